"""A gateway on a real port, real PostgreSQL and Redis behind it, and an engine whose faults a test writes down."""

from __future__ import annotations

import asyncio
import io
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

import aiohttp
import uvicorn
from aiohttp import web

from app.ledger import attempts, model_replicas
from app.ledger.accept import NewRun, accept
from app.ledger.database import Database
from app.ledger.model_replicas import NewReplica
from app.ledger.model_sessions import open_session
from app.model_service.dialects import codec_for
from app.model_service.dialects.base import Reply
from app.model_service.gateway.app import Gateway
from app.model_service.gateway.congestion import CongestionWindow
from app.model_service.gateway.keys import Keys
from app.model_service.recording.recorder import Recorder, _account_after
from app.model_service.recording.rows import has_tools
from app.models.model_calls import Account, CallEnd, Dialect, Exchange, ModelSession, TokenUse
from app.models.spec import ModelChoice, TaskSpec
from app.settings import Settings
from tests.building import a_task, claim_of
from tests.integration.rows import write

MODEL = "writer"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


# --- Engines --------------------------------------------------------------------------------------------------------


class Engine:
    """An HTTP server that answers every call with `handler`, which a test changes as it goes."""

    def __init__(self) -> None:
        self.handler: Handler = self.well
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        self.inside = self.most = 0
        self.models: list[str] | int = []  # what it lists, or the status with which it refuses to
        self.owner = ""  # as its list of models says
        self.keys: list[str | None] = []  # with which it was asked for its models
        self.more: dict[str, Handler] = {}  # by path
        self.metrics = ""
        self.asked_for_metrics = 0
        self.port = 0
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        for path, handler in self.more.items():
            app.router.add_post(path, handler)
        app.router.add_post("/v1/{path:.*}", self._any)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self.url = f"http://127.0.0.1:{self.port}/v1"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": []})

    async def _models(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("authorization"))
        if isinstance(self.models, int):
            return web.json_response({"error": {"message": "not here"}}, status=self.models)
        data = [{"id": one, **({"owned_by": self.owner} if self.owner else {})} for one in self.models]
        return web.json_response({"object": "list", "data": data})

    async def _metrics(self, request: web.Request) -> web.Response:
        self.asked_for_metrics += 1
        return web.Response(text=self.metrics, status=200 if self.metrics else 404)

    async def _any(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.seen.append((request.match_info["path"], {k.lower(): v for k, v in request.headers.items()}, body))
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            return await self.handler(request)
        finally:
            self.inside -= 1

    @property
    def last(self) -> dict[str, Any]:
        return dict(json.loads(self.seen[-1][2]))

    # Answers

    async def well(self, request: web.Request) -> web.StreamResponse:
        """As an engine that speaks all dialects."""
        body = json.loads(await request.read())
        content = whole(Dialect(request.match_info["path"]), body)
        if not body.get("stream"):
            return web.json_response(content)
        return await streamed(request, events(Dialect(request.match_info["path"]), body))


def _reply(model: str) -> Reply:
    return Reply({"role": "assistant", "content": "Good day."}, "stop", TokenUse(prompt=100, completion=10), model)


def whole(dialect: Dialect, body: dict[str, Any]) -> dict[str, Any]:
    """A small answer in that dialect."""
    codec = codec_for(dialect)
    return codec.whole(_reply(body["model"]), id="1", request=codec.request(body))


def events(dialect: Dialect, body: dict[str, Any]) -> list[bytes]:
    """The same as server-sent events."""
    codec = codec_for(dialect)
    return list(codec.events(_reply(body["model"]), id="1", request=codec.request(body)))


async def streamed(request: web.Request, pieces: list[bytes], *, pause_s: float = 0.0) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
        await asyncio.sleep(pause_s)
    await response.write_eof()
    return response


def answers(status: int, content: bytes, headers: dict[str, str] | None = None) -> Handler:
    """A handler that always says this."""

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=content, content_type="application/json", headers=headers)

    return handler


def pauses(first: bytes, rest: bytes, go_on: asyncio.Event) -> Handler:
    """A handler that streams in two parts."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(first)
        await go_on.wait()
        await response.write(rest)
        return response

    return handler


def breaks_off(pieces: list[bytes], how: str) -> Handler:
    """A handler whose stream goes no further than these pieces: `abort`, `close` or `silence`."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        assert request.transport is not None
        if how == "abort":
            request.transport.close()
        if how == "silence":
            await asyncio.sleep(60)
        return response

    return handler


def says(status: int, message: str = "no", *, times: int = 10**9, headers: dict[str, str] | None = None) -> Any:
    """A handler factory: `status` for so many calls, then well."""
    left = [times]

    def of(engine: Engine) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            if left[0] <= 0:
                return await engine.well(request)
            left[0] -= 1
            error = {"error": {"message": message, "type": "x", "code": None}}
            return web.json_response(error, status=status, headers=headers)

        return handler

    return of


# --- Recording ------------------------------------------------------------------------------------------------------


@dataclass
class Notes:
    """A recorder that keeps everything in memory, with prices of $1 for a million tokens."""

    exchanges: list[Exchange] = field(default_factory=list)
    accounts: dict[UUID, Account] = field(default_factory=dict)
    run_bound: float | None = None
    run_spent: float = 0.0
    flushed: list[UUID] = field(default_factory=list)

    async def account(self, session: ModelSession) -> Account:
        return self.accounts.get(session.attempt_id, Account())

    async def run_spend(self, session: ModelSession) -> tuple[float, float | None]:
        return self.run_spent, self.run_bound

    def record(self, exchange: Exchange) -> TokenUse:
        self.exchanges.append(exchange)
        usage = codec_for(exchange.dialect).usage(exchange.response, streamed=exchange.streamed)
        old = self.accounts.get(exchange.session.attempt_id, Account())
        tools = has_tools(exchange.request)
        answered = exchange.end is CallEnd.ANSWERED and (tools or not old.offered_tools)
        if answered and tools and not old.offered_tools:
            old = replace(old, turns=0, offered_tools=True)
        cost_usd = (usage.total or 0) / 1e6
        self.accounts[exchange.session.attempt_id] = _account_after(old, exchange, usage, cost_usd, answered)
        return usage

    async def flush(self, attempt_id: UUID) -> None:
        self.flushed.append(attempt_id)

    def forget(self, attempt_id: UUID) -> None:
        pass

    async def close(self) -> None:
        pass

    @property
    def last(self) -> Exchange:
        return self.exchanges[-1]

    @property
    def ends(self) -> Counter[CallEnd]:
        return Counter(one.end for one in self.exchanges)

    async def until(self, count: int) -> None:
        """So many calls are on record: that is a moment after their answers."""
        while len(self.exchanges) < count:
            await asyncio.sleep(0.01)


# --- Everything -----------------------------------------------------------------------------------------------------


def an_attempt(
    database: Database, token: str, *, model: ModelChoice | None = None, user: str = "default", **limits: Any
) -> attempts.Claim:
    """A running attempt with a session for `token`."""
    task = a_task(f"task-{token}")
    task = task.model_copy(update={"limits": task.limits.model_copy(update=limits)})
    spec = TaskSpec(task=task, agent="nop", model=model or ModelChoice(name=MODEL), mode="persistent")
    claim = claim_of(database, accept(database, NewRun(specs=[spec], user_name=user)))
    open_session(database, claim, token)
    return claim


def end_attempt(database: Database, claim: attempts.Claim) -> None:
    ended = "state = 'lost', end_reason = 'lost', finished_at = clock_timestamp()"
    write(database, f"UPDATE attempts SET {ended} WHERE id = :id", id=claim.attempt_id)


class Fixture:
    """The gateway, a client of it, and one engine for the model `MODEL`."""

    def __init__(self, settings: Settings, engine: Engine | None = None) -> None:
        self.settings = settings
        self.database = Database(settings.database())
        self.notes = Notes()
        self.engine = engine or Engine()
        self.url = ""
        self.app: Gateway
        self.http: aiohttp.ClientSession
        self.stop: Callable[[], Awaitable[None]]  # of the gateway

    async def post(
        self,
        path: str = "/v1/chat/completions",
        body: dict[str, Any] | None = None,
        *,
        token: str = "t1",
        data: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """Status and body of one call."""
        sent = io.BytesIO(json.dumps(body).encode() if data is None else data)
        async with self.http.post(
            self.url + path, data=sent, headers={"Authorization": f"Bearer {token}"} | (headers or {})
        ) as answer:
            return answer.status, await answer.read()

    async def ask(self, dialect: Dialect = Dialect.CHAT, *, token: str = "t1", **wishes: Any) -> tuple[int, Any]:
        """Status and parsed body of a small call in that dialect."""
        status, content = await self.post(f"/v1/{dialect.value}", request(dialect, **wishes), token=token)
        return status, json.loads(content)

    async def add(self, url: str, model: str = MODEL, **values: Any) -> None:
        """A replica, known to the gateway when this returns."""
        await asyncio.to_thread(model_replicas.add, self.database, NewReplica(model=model, url=url, **values))
        await self.knows(lambda: any(t.engine.url == url for t in self.app.routes._table.get(model, ())))

    def anew(self) -> None:
        """Forget what has happened so far: the next calls are the first."""
        self.notes.exchanges.clear()
        self.notes.accounts.clear()
        self.engine.seen.clear()
        self.engine.handler = self.engine.well
        self.app.routes.engine(self.engine.url).window = CongestionWindow()

    async def knows(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.01)


def request(dialect: Dialect, **wishes: Any) -> dict[str, Any]:
    """A small request in that dialect."""
    body: dict[str, Any] = {"model": MODEL}
    if dialect is Dialect.RESPONSES:
        body["input"] = "Hello"
    else:
        body["messages"] = [{"role": "user", "content": "Hello"}]
    if dialect is Dialect.MESSAGES:
        body["max_tokens"] = 100
    return body | wishes


@asynccontextmanager
async def fixture(
    settings: Settings,
    *,
    keys: dict[str, str] | None = None,
    replica: bool = True,
    attempt: bool = True,
    engine: Engine | None = None,
    recorder: Callable[[Fixture], Recorder | Notes] = lambda made: made.notes,
    **options: Any,
) -> AsyncIterator[Fixture]:
    """A gateway with one engine, that `MODEL` is routed to when `replica`."""
    made = Fixture(settings, engine)
    await made.engine.start()
    made.app = Gateway(settings, made.database, recorder=lambda: recorder(made), keys=Keys(keys or {}), **options)
    config = uvicorn.Config(
        made.app,
        host="127.0.0.1",
        port=0,
        lifespan="on",
        log_config=None,
        access_log=False,
        http="httptools",
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)
    listener = config.bind_socket()
    made.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    serving = asyncio.create_task(server._serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
        assert not serving.done(), serving.exception()
    made.http = aiohttp.ClientSession()

    async def stop() -> None:
        server.should_exit = True
        await asyncio.shield(serving)

    made.stop = stop
    try:
        if attempt:
            await asyncio.to_thread(an_attempt, made.database, "t1")
        if replica:
            await made.add(made.engine.url)
        yield made
    finally:
        await made.http.close()
        await stop()
        await made.engine.stop()
        made.database.close()
