"""Calls have an end, also those that agent or engine do not end; and nobody calls after the account is closed."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from app.ledger import limits
from app.model_service.gateway import calls
from app.model_service.recording.recorder import _estimated
from app.models.model_calls import CallEnd, Dialect, Exchange, TokenUse
from app.models.spec import ModelChoice
from app.workers.model_access import GatewayClient
from tests.integration.gateway_fixture import (
    MODEL,
    Fixture,
    an_attempt,
    events,
    fixture,
    request,
    streamed,
)
from tests.services import MakeSettings


async def _hung_up(g: Fixture, *, after_s: float, stream: bool = False, first: bytes = b"") -> Exchange:
    """Of a call to an engine that says `first` and nothing else, the record; the agent gives up when it has waited."""

    async def silent(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        if first:
            await response.prepare(request)
            await response.write(first)
        await asyncio.sleep(60)
        return response

    g.engine.handler = silent
    call = asyncio.create_task(g.post(body=request(Dialect.CHAT, stream=stream)))
    while not g.engine.inside:
        await asyncio.sleep(0.01)
    await asyncio.sleep(after_s)
    call.cancel()
    await g.notes.until(1)
    return g.notes.last


@pytest.mark.parametrize("first", [b"", b"data: {}\n\n"])
async def test_who_hangs_up_on_an_engine_that_is_silent_was_stopped_by_it(
    make_settings: MakeSettings, first: bytes
) -> None:
    async with fixture(make_settings(model_timeout_s=1)) as g:  # bears half of it
        kept = await _hung_up(g, after_s=0.7, stream=bool(first), first=first)
        assert kept.end is CallEnd.UPSTREAM_TIMEOUT
        assert kept.detail.startswith("the agent hung up after ")
        assert kept.detail.endswith(" s without a byte")


async def test_an_attempt_has_a_bound_of_calls_at_once(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_MOST_AT_ONCE", 1)
    async with fixture(make_settings()) as g:
        go = asyncio.Event()

        async def waits(request: web.Request) -> web.StreamResponse:
            await go.wait()
            return await g.engine.well(request)

        g.engine.handler = waits
        first = asyncio.create_task(g.ask())
        while not g.engine.inside:
            await asyncio.sleep(0.01)
        status, said = await g.ask()
        assert (status, "may have 1" in str(said)) == (429, True)
        go.set()
        assert (await first)[0] == 200


async def test_an_agent_that_does_not_read_its_answer_gives_its_engine_back(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_READER_S", 0.5)
    async with fixture(make_settings()) as g:

        async def endless(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            while True:
                await response.write(b"data: {}\n\n" * 20_000)

        g.engine.handler = endless
        url, body = urlsplit(g.url), json.dumps(request(Dialect.CHAT, stream=True)).encode()
        _, writer = await asyncio.open_connection(url.hostname, url.port, limit=1 << 10)
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer t1\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await g.notes.until(1)
        assert g.notes.last.end is CallEnd.CLIENT_GONE
        assert "took nothing" in g.notes.last.detail
        writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_trickles_does_not_hold_a_call_for_ever(make_settings: MakeSettings, stream: bool) -> None:
    async with fixture(make_settings(model_timeout_s=0.25)) as g:

        async def trickles(request: web.Request) -> web.StreamResponse:
            kind = "text/event-stream" if stream else "application/json"
            response = web.StreamResponse(headers={"content-type": kind})
            await response.prepare(request)
            while True:
                await response.write(b": still here\n\n" if stream else b" ")
                await asyncio.sleep(0.05)

        g.engine.handler = trickles
        status, said = await g.post(body=request(Dialect.CHAT, stream=stream))
        assert status == (200 if stream else 504)
        assert b"error" in said
        await g.notes.until(1)
        assert g.notes.last.end is CallEnd.UPSTREAM_TIMEOUT
        assert len(g.engine.seen) == 1


async def test_the_time_of_an_engine_does_not_run_while_a_call_waits(make_settings: MakeSettings) -> None:
    async with fixture(make_settings(model_timeout_s=0.5)) as g:
        engine = g.app.routes.engine(g.engine.url)
        engine.window.size = 0
        call = asyncio.create_task(g.ask())
        await g.knows(lambda: engine.window.waiting == 1)
        await asyncio.sleep(3.5)  # more than the engine would have, with all that is spared
        engine.window.size = 1
        engine.window._admit()
        assert (await call)[0] == 200


async def test_limits_of_a_model_hold_whatever_an_agent_calls_it(make_settings: MakeSettings) -> None:
    settings = make_settings(gateway_patience_s=0.3)
    async with fixture(settings) as g:
        await asyncio.to_thread(
            an_attempt,
            g.database,
            "t2",
            model=ModelChoice(name="stable", base_url=g.engine.url, side_models=("side", MODEL)),
        )
        await asyncio.to_thread(limits.set_limit, g.database, "model_requests:model:stable", 0)
        while not await g.app.services.limiter._capacities():
            await asyncio.sleep(0.02)
        assert (await g.ask(token="t2", model="side"))[0] == 429
        assert (await g.ask(token="t2", model=MODEL))[0] == 200, "a model with limits of its own"
        await g.notes.until(2)
        assert (g.notes.last.asked_model, g.notes.last.built_in) == (MODEL, False)


async def test_a_session_stays_closed_for_every_gateway(make_settings: MakeSettings) -> None:
    settings = make_settings()
    async with fixture(settings) as g:
        assert (await g.ask())[0] == 200
        with GatewayClient(g.url, "t1") as client:
            first = await asyncio.to_thread(client.account)
            closed = await asyncio.to_thread(client.close)
            assert closed is not None
            assert first.gateway == closed.gateway != ""
            g.app.services.attempts._by_id.clear()  # swept
            assert (await g.ask())[0] == 403
            status, _ = await g.post("/v1/messages/count_tokens", request(Dialect.MESSAGES))
            assert status == 403
        async with fixture(settings, attempt=False) as again:
            assert (await again.ask())[0] == 403
            with GatewayClient(again.url, "t1") as client:
                account = await asyncio.to_thread(client.close)
            assert account is not None
            assert account.gateway != first.gateway, "another process"


SECRET = "sk-very-secret-0123456789"


async def test_a_key_in_the_first_event_of_a_stream_is_not_shown(make_settings: MakeSettings) -> None:
    async with fixture(make_settings(), replica=False, keys={"ENGINE_KEY": SECRET}) as g:
        await g.add(g.engine.url, api_key_env="ENGINE_KEY")
        error = json.dumps({"error": {"message": f"Incorrect API key provided: {SECRET}", "code": 401}}).encode()

        async def handler(request: web.Request) -> web.StreamResponse:
            begun = b"event: error\n" if request.match_info["path"] != "chat/completions" else b""
            return await streamed(request, [begun + b"data: ", error[:60], error[60:] + b"\n\n"], pause_s=0.02)

        g.engine.handler = handler
        for dialect in Dialect:
            g.anew()
            g.engine.handler = handler
            _, said = await g.post(f"/v1/{dialect.value}", request(dialect, stream=True))
            await g.notes.until(1)
            assert b"[key]" in said
            assert SECRET.encode() not in said + g.notes.last.response
            assert SECRET not in g.notes.last.detail


async def test_who_hangs_up_on_a_limit_was_stopped_by_it(make_settings: MakeSettings) -> None:
    async with fixture(make_settings(model_timeout_s=1)) as g:
        await asyncio.to_thread(limits.set_limit, g.database, "model_requests:user:default", 0)
        while not await g.app.services.limiter._capacities():
            await asyncio.sleep(0.02)
        call = asyncio.create_task(g.ask())
        await g.knows(lambda: any(one.waiting_since for one in g.app.services.attempts._by_id.values()))
        await asyncio.sleep(0.7)
        call.cancel()
        await g.notes.until(1)
        assert g.notes.last.end is CallEnd.THROTTLED
        assert g.engine.seen == []


async def test_who_hangs_up_before_the_tokens_are_told_has_had_an_answer_all_the_same(
    make_settings: MakeSettings,
) -> None:
    async with fixture(make_settings()) as g:
        told = [one for one in events(Dialect.CHAT, request(Dialect.CHAT, stream=True)) if b'"usage":{' not in one]
        kept = await _hung_up(g, after_s=0.3, stream=True, first=b"".join(told).replace(b"data: [DONE]\n\n", b""))
        assert (kept.end, kept.detail) == (CallEnd.ANSWERED, "the agent hung up")
        unknown = _estimated(kept, TokenUse())
        assert unknown.total, "it would be free"
        assert _estimated(replace(kept, detail=""), TokenUse()) == TokenUse()
        told_all = TokenUse(prompt=1, completion=1)
        assert _estimated(kept, told_all) == told_all
        assert _estimated(replace(kept, end=CallEnd.CLIENT_GONE, detail="it takes nothing"), TokenUse()).total


async def test_a_number_without_end_is_the_callers_and_no_fault_of_ours(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:
        data = json.dumps(request(Dialect.CHAT))[:-1] + ', "tools": [{}], "seed": ' + "1" * 400 + "}"
        await g.post(data=data.encode())
        await g.notes.until(1)
        assert g.notes.last.end is not CallEnd.UPSTREAM_ERROR, g.notes.last.detail
