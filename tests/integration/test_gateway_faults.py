"""Engines that fail, and what of it an agent gets to see."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
from aiohttp import web

from app.models.model_calls import ENGINE_FAULTS, CallEnd, Dialect
from tests.integration.gateway_fixture import (
    MODEL,
    Engine,
    an_attempt,
    answers,
    breaks_off,
    events,
    fixture,
    request,
    says,
    streamed,
)
from tests.services import MakeSettings

SECRET = "sk-very-secret-0123456789"


BROKEN = [
    (500, b'{"error": {"message": "boom"}}', CallEnd.UPSTREAM_ERROR),
    (502, b"<html>Bad Gateway</html>", CallEnd.UPSTREAM_ERROR),
    (200, b"<html>This is no completion.</html>", CallEnd.UPSTREAM_ERROR),
    (200, b'{"hello": 1}', CallEnd.UPSTREAM_ERROR),
    (302, b"", CallEnd.UPSTREAM_ERROR),
]


async def test_a_busy_engine_is_waited_for(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:
        for status in (429, 503, 529):
            g.anew()
            g.engine.handler = says(status, times=2, headers={"retry-after": "0.1"})(g.engine)
            assert (await g.ask())[0] == 200
            await g.notes.until(1)
            assert (g.notes.last.end, g.notes.last.retries) == (CallEnd.ANSWERED, 2)
            assert g.notes.last.waited_s[f"engine:{g.engine.url}"] > 0.15
            assert g.app.routes.engine(g.engine.url).window.size < 10, "it gets fewer at once from now on"


async def test_a_crowd_is_let_in_as_the_engine_can_take_it(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:

        async def four(request: web.Request) -> web.StreamResponse:
            if g.engine.inside > 4:
                error = {"error": {"message": "busy"}}
                return web.json_response(error, status=429, headers={"retry-after": "0.05"})
            await asyncio.sleep(0.01)
            return await g.engine.well(request)

        g.engine.handler = four
        answers = await asyncio.gather(*(g.ask() for _ in range(60)))
        assert {status for status, _ in answers} == {200}
        refused = len(g.engine.seen) - 60
        assert 0 < refused < 60, "most are not sent before there is room"


async def test_a_broken_engine_is_asked_a_few_times(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:
        for status, content, end in BROKEN:
            g.anew()

            g.engine.handler = answers(status, content)
            seen, said = await g.ask(Dialect.MESSAGES)
            assert seen == (status if status >= 500 else 502)
            assert said["type"] == "error"
            assert len(g.engine.seen) == 3
            await g.notes.until(1)
            assert (g.notes.last.end, g.notes.last.retries) == (end, 2)
            g.engine.handler = says(500, times=1)(g.engine)
            assert (await g.ask())[0] == 200, "one that recovers is not noticed"


async def test_a_restart_of_the_engine_is_not_seen_by_agents(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:
        port = g.engine.port
        assert (await g.ask())[0] == 200
        inside = asyncio.Event()

        async def dies(request: web.Request) -> web.StreamResponse:
            inside.set()
            assert request.transport is not None
            request.transport.abort()  # in the middle of a call
            return web.Response()

        g.engine.handler = dies
        call = asyncio.create_task(g.ask())
        await inside.wait()
        await g.engine.stop()
        more = [asyncio.create_task(g.ask(dialect)) for dialect in Dialect]
        engine = g.app.routes.engine(g.engine.url)
        await g.knows(lambda: not engine.healthy and g.app.services.attempts.in_flight == 4)
        g.engine.handler = g.engine.well
        await g.engine.start(port)
        assert (await call)[0] == 200
        assert [status for status, _ in await asyncio.gather(*more)] == [200, 200, 200]
        await g.notes.until(5)
        assert g.notes.ends == {CallEnd.ANSWERED: 5}


async def test_an_engine_that_stays_away_is_named(make_settings: MakeSettings) -> None:
    async with fixture(make_settings(gateway_patience_s=0.5)) as g:
        await g.engine.stop()
        status, said = await g.ask()
        assert status == 503
        assert g.engine.url in said["error"]["message"]
        await g.notes.until(1)
        assert g.notes.last.end is CallEnd.UPSTREAM_UNREACHABLE


async def test_an_engine_that_hangs_is_left_after_its_time(make_settings: MakeSettings) -> None:
    async with fixture(make_settings(model_timeout_s=0.5)) as g:

        async def hangs(request: web.Request) -> web.Response:
            await asyncio.sleep(60)
            return web.Response()

        g.engine.handler = hangs
        status, said = await g.ask()
        assert (status, said["error"]["message"]) == (504, "the engine said nothing for 0.5 s")
        await g.notes.until(1)
        assert g.notes.last.end is CallEnd.UPSTREAM_TIMEOUT
        assert g.app.routes.engine(g.engine.url).window.inside == 0


async def test_a_stream_that_is_cut_ends_with_an_error(make_settings: MakeSettings) -> None:
    async with fixture(make_settings(model_timeout_s=0.5)) as g:
        for dialect, how in itertools.product(Dialect, ["abort", "close", "silence"]):
            g.anew()
            wish = request(dialect, stream=True)
            pieces = events(dialect, wish)

            g.engine.handler = breaks_off(pieces[:2], how)
            status, said = await g.post(f"/v1/{dialect.value}", wish)
            assert status == 200
            assert said.startswith(pieces[0])
            last = said.rstrip().split(b"\n\n")[-1]
            assert b"error" in last
            assert b"[DONE]" not in said
            await g.notes.until(1)
            assert g.notes.last.end is (CallEnd.UPSTREAM_TIMEOUT if how == "silence" else CallEnd.CUT)
            assert g.notes.last.end in ENGINE_FAULTS
            assert len(g.engine.seen) == 1, "what has begun is not done twice"


async def test_an_error_in_the_middle_of_a_stream_is_passed_on(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:
        wish = request(Dialect.CHAT, stream=True)
        error = b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'
        pieces = [*events(Dialect.CHAT, wish)[:2], error, b"data: [DONE]\n\n"]

        async def handler(request: web.Request) -> web.StreamResponse:
            return await streamed(request, pieces, pause_s=0.01)

        g.engine.handler = handler
        _, said = await g.post(body=wish)
        assert error in said
        await g.notes.until(1)
        assert g.notes.last.end is CallEnd.UPSTREAM_ERROR

        async def at_once(request: web.Request) -> web.StreamResponse:
            return await streamed(request, [error])

        g.engine.handler = at_once
        status, _ = await g.post(body=wish)
        assert status == 500, "nothing was sent yet, so that it can still be a status"
        assert len(g.engine.seen) == 1 + 3


TOO_LONG: list[tuple[int, dict[str, Any]]] = [
    (400, {"error": {"message": "too much", "type": "invalid_request_error", "code": "context_length_exceeded"}}),
    (400, {"object": "error", "message": "This model's maximum context length is 8192 tokens. However, …"}),
    (400, {"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long: 9 > 8"}}),
    (400, {"error": {"message": "The input (9 tokens) is longer than the model's context length (8 tokens)."}}),
]


async def test_a_conversation_that_no_longer_fits_is_told_as_each_dialect_tells_it(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:
        for dialect in Dialect:
            g.anew()
            for status, body in TOO_LONG:
                g.engine.handler = answers(status, json.dumps(body).encode())
                status, said = await g.ask(dialect)
                assert status == 400
                words = "prompt is too long" if dialect is Dialect.MESSAGES else "maximum context length"
                assert words in said["error"]["message"]
                assert said["error"].get("code") == "context_length_exceeded"
            await g.notes.until(len(TOO_LONG))
            assert g.notes.ends == {CallEnd.CONTEXT_EXHAUSTED: len(TOO_LONG)}
            assert len(g.engine.seen) == len(TOO_LONG)


async def test_a_refusal_is_passed_on_as_it_is(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:
        for status, end in [(400, CallEnd.REFUSED), (404, CallEnd.NOT_FOUND), (401, CallEnd.UNAUTHORISED)]:
            g.anew()
            content = json.dumps({"error": {"message": f"The model `{MODEL}` is not here", "own": [1, 2]}}).encode()

            g.engine.handler = answers(status, content)
            for dialect in Dialect:
                assert await g.post(f"/v1/{dialect.value}", request(dialect)) == (status, content)
            await g.notes.until(3)
            assert g.notes.ends == {end: 3}
            assert len(g.engine.seen) == 3


async def test_a_key_is_sent_and_nowhere_shown(make_settings: MakeSettings, caplog: pytest.LogCaptureFixture) -> None:
    keys = {"ENGINE_KEY": SECRET}
    async with fixture(make_settings(), keys=keys, replica=False) as g:
        await g.add(g.engine.url, api_key_env="ENGINE_KEY")

        for status in (401, 400, 500):

            async def tells(request: web.Request, status: int = status) -> web.Response:
                error = {"error": {"message": f"wrong key {request.headers['Authorization']}"}}
                return web.json_response(error, status=status)

            g.engine.handler = tells
            for dialect in Dialect:
                _, said = await g.post(f"/v1/{dialect.value}", request(dialect))
                assert SECRET.encode() not in said
                assert b"[key]" in said
        assert g.engine.seen[0][1]["authorization"] == f"Bearer {SECRET}"
        await g.notes.until(9)
        assert SECRET not in repr(g.notes.exchanges)
        assert {"t1"}.isdisjoint(g.engine.seen[0][1].values())
    assert SECRET not in caplog.text


async def test_an_attempt_stays_with_its_engine_until_that_is_gone(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:
        others = [Engine(), Engine()]
        for other in others:
            await other.start()
        await g.add(others[0].url)
        engines = [g.engine, *others]
        tokens = [f"a{n}" for n in range(12)]
        for token in tokens:
            await asyncio.to_thread(an_attempt, g.database, token)
        where: dict[str, Engine] = {}
        for time in range(3):
            if time == 1:
                await g.add(others[1].url)  # takes new attempts, and none of those that are elsewhere
            for token in tokens:
                before = [len(one.seen) for one in engines]
                assert (await g.ask(token=token))[0] == 200
                (used,) = [one for one, count in zip(engines, before, strict=True) if len(one.seen) > count]
                assert where.setdefault(token, used) is used
        assert len(set(where.values())) > 1, "not all of them at one"
        gone = where[tokens[0]]
        await gone.stop()
        stayed = {token: one for token, one in where.items() if one is not gone}
        for token in tokens:
            assert (await g.ask(token=token))[0] == 200
        await g.notes.until(48)
        for exchange, token in zip(g.notes.exchanges[36:], tokens, strict=True):
            assert exchange.replica != gone.url
            if token in stayed:
                assert exchange.replica == stayed[token].url
        for one in others:
            await one.stop()
