"""The gateway as the process that it is: with the real recorder, killed, told to stop, idle with many streams."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from uuid import uuid4

import aiohttp
from aiohttp import web

from app.ledger import limits, model_replicas
from app.ledger.database import Database
from app.ledger.model_replicas import NewReplica
from app.models.model_calls import CallEnd, Dialect
from app.settings import PREFIX, Settings
from app.stack.programs import programs
from app.workers.model_access import GatewayClient
from tests.integration.gateway_fixture import MODEL, Engine, an_attempt, events, fixture, request
from tests.integration.rows import every
from tests.services import MakeSettings


class Process:
    """One gateway at a port of its own."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.port = 0
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self.log = ""
        self.stop_wait_s = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        settings = self.settings
        environ = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)} | {
            "MEGAFLOW_HOME": str(settings.home),
            "MEGAFLOW_INSTALLATION": settings.installation,
            "MEGAFLOW_DATABASE_URL": settings.database(),
            "MEGAFLOW_BROKER_URL": settings.broker(),
            "MEGAFLOW_GATEWAY_PATIENCE_S": str(settings.gateway_patience_s),
        }
        [program] = [one for one in programs(settings) if one.name == "gateway"]
        command = list(program.command)  # as an installation starts it
        command[command.index("--port") + 1] = str(self.port)
        self.stop_wait_s = program.stop_wait_s
        self._process = await asyncio.create_subprocess_exec(
            *command, env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        self.log = ""
        listening = asyncio.Event()
        self._reading = asyncio.create_task(self._read(listening))
        await listening.wait()
        found = re.search(r"gateway\.listening.*port=(\d+)", self.log)
        assert found, self.log
        self.port = int(found[1])

    async def _read(self, listening: asyncio.Event) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self.log += line.decode()
            if "gateway.listening" in self.log:
                listening.set()
        listening.set()

    async def end(self, number: signal.Signals) -> int:
        assert self._process is not None
        assert self._reading is not None
        if self._process.returncode is None:
            self._process.send_signal(number)
        code = await asyncio.wait_for(self._process.wait(), self.stop_wait_s)
        await self._reading
        return code


@asynccontextmanager
async def gateway(settings: Settings) -> AsyncIterator[tuple[Process, Engine, Database, aiohttp.ClientSession]]:
    database = Database(settings.database())
    engine, process = Engine(), Process(settings)
    await engine.start()
    await asyncio.to_thread(an_attempt, database, "t1", max_steps=4)
    await asyncio.to_thread(model_replicas.add, database, NewReplica(MODEL, engine.url, dialects=tuple(Dialect)))
    await process.start()
    http = aiohttp.ClientSession(headers={"Authorization": "Bearer t1"}, connector=aiohttp.TCPConnector(limit=0))
    try:
        yield process, engine, database, http
    finally:
        await http.close()
        await process.end(signal.SIGKILL)
        await engine.stop()
        database.close()


def _ends(database: Database) -> list[str]:
    return [row.end_kind for row in every(database, "SELECT end_kind FROM model_calls ORDER BY started_at")]


async def _ask(
    http: aiohttp.ClientSession, process: Process, headers: Mapping[str, str] | None = None, **wishes: object
) -> int:
    url = f"{process.url}/v1/chat/completions"
    async with http.post(url, json=request(Dialect.CHAT, **wishes), headers=headers) as answer:
        await answer.read()
        return answer.status


async def test_a_killed_gateway_loses_no_account(make_settings: MakeSettings) -> None:
    async with gateway(make_settings()) as (process, engine, database, http):
        assert await _ask(http, process) == 200
        assert await _ask(http, process) == 200
        with GatewayClient(process.url, "t1") as client:
            assert (await asyncio.to_thread(client.account)).turns == 2
        while len(await asyncio.to_thread(_ends, database)) < 2:
            await asyncio.sleep(0.05)
        inside = asyncio.Event()

        async def hangs(request: web.Request) -> web.Response:
            inside.set()
            await asyncio.sleep(60)
            return web.Response()

        engine.handler = hangs
        call = asyncio.create_task(_ask(http, process))
        await inside.wait()
        await process.end(signal.SIGKILL)
        broken = (await asyncio.gather(call, return_exceptions=True))[0]
        assert isinstance(broken, aiohttp.ClientError), "an agent tries again"
        with GatewayClient(process.url, "t1") as client:
            assert client.close(1.0) is None, "a worker goes on without it"
        engine.handler = engine.well
        await process.start()
        assert [await _ask(http, process) for _ in range(3)] == [200, 200, 400], "the turns before it count"
        with GatewayClient(process.url, "t1") as client:
            account = await asyncio.to_thread(client.close)
        assert account is not None
        assert (account.calls, account.turns, account.stopped_by) == (5, 4, CallEnd.STEP_LIMIT)
        assert (await asyncio.to_thread(_ends, database)) == ["answered"] * 4 + ["step_limit"]


async def test_gateways_beside_each_other_share_limits_and_keep_to_their_attempts(make_settings: MakeSettings) -> None:
    settings = make_settings()
    async with gateway(settings) as (first, engine, database, http):
        second = Process(settings)
        await asyncio.to_thread(an_attempt, database, "t2")
        await second.start()
        try:
            name = f"model_concurrency:model:{MODEL}"
            await asyncio.to_thread(limits.set_limit, database, name, 2)

            async def slow(request: web.Request) -> web.StreamResponse:
                await asyncio.sleep(0.05)
                return await engine.well(request)

            engine.handler = slow
            more = {"Authorization": "Bearer t2"}
            calls = [_ask(http, first) for _ in range(4)]
            calls += [_ask(http, second, headers=more) for _ in range(8)]
            assert set(await asyncio.gather(*calls)) == {200}
            assert engine.most == 2
        finally:
            await second.end(signal.SIGKILL)


async def test_a_gateway_that_is_told_to_stop_lets_streams_end(make_settings: MakeSettings) -> None:
    async with gateway(make_settings()) as (process, engine, database, http):
        wish = request(Dialect.CHAT, stream=True, stream_options={"include_usage": True})
        pieces = events(Dialect.CHAT, wish)
        go_on = asyncio.Event()

        async def handler(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            await response.write(pieces[0])
            if json.loads(await request.read()).get("user") == "endless":
                await asyncio.sleep(60)
            await go_on.wait()
            await response.write(b"".join(pieces[1:]))
            return response

        engine.handler = handler
        async with (
            http.post(f"{process.url}/v1/chat/completions", json=wish) as ends,
            http.post(f"{process.url}/v1/chat/completions", json=wish | {"user": "endless"}) as endless,
        ):
            await ends.content.readexactly(len(pieces[0]))
            await endless.content.readexactly(len(pieces[0]))
            stopping = asyncio.create_task(process.end(signal.SIGTERM))
            await asyncio.sleep(0)
            go_on.set()
            assert await ends.read() == b"".join(pieces[1:])
            (rest,) = await asyncio.gather(endless.read(), return_exceptions=True)
            assert isinstance(rest, aiohttp.ClientError)
        await stopping
        assert sorted(await asyncio.to_thread(_ends, database)) == ["answered", "cut"]


async def test_of_several_gateways_each_refuses_the_attempts_of_the_others(make_settings: MakeSettings) -> None:
    settings = make_settings(gateways=2)
    mine, other = settings.gateway_bases()
    async with fixture(settings, attempt=False, base=mine) as g:
        seen: dict[str, int] = {}
        while len(seen) < 2:
            token = uuid4().hex
            claim = await asyncio.to_thread(an_attempt, g.database, token)
            status, said = await g.ask(token=token)
            seen[settings.gateway_of(claim.attempt_id)] = status
            if status != 200:
                assert said["error"]["code"] == "misdirected"
                assert other in said["error"]["message"]
        assert seen == {mine: 200, other: 421}
