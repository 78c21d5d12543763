"""Engines that say odd things: `Retry-After: 0`, keys in their errors, options they do not take, broken connections."""

from __future__ import annotations

import json

import pytest
from aiohttp import web

from app.models.model_calls import CallEnd, Dialect
from tests.integration.gateway_ground import answers, events, ground, request, run, says, streamed
from tests.services import MakeSettings

SECRET = "sk-very-secret-0123456789"


@pytest.mark.parametrize("after", ["0", "Wed, 21 Oct 2015 07:28:00 GMT", "0.001"])
def test_who_is_always_told_to_come_at_once_does_not(make_settings: MakeSettings, after: str) -> None:
    async def story() -> None:
        async with ground(make_settings(gateway_patience_s=1.5)) as g:
            g.engine.handler = says(429, headers={"retry-after": after})(g.engine)
            assert (await g.ask())[0] == 429
            await g.notes.until(1)
            assert g.notes.last.end is CallEnd.UPSTREAM_BUSY
            assert len(g.engine.seen) <= 4

    run(story())


def test_a_key_in_the_first_event_of_a_stream_is_not_shown(make_settings: MakeSettings) -> None:
    async def story() -> None:
        async with ground(make_settings(), replica=False, keys={"ENGINE_KEY": SECRET}) as g:
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

    run(story())


def test_an_option_counts_as_unknown_when_it_goes_without_it(make_settings: MakeSettings) -> None:
    async def story() -> None:
        async with ground(make_settings()) as g:
            engine = g.app.routes.engine(g.engine.url)
            error = {"error": {"message": "Invalid value: 'stream_options' is what the user wrote"}}
            g.engine.handler = answers(400, json.dumps(error).encode())
            wish = request(Dialect.CHAT, stream=True)
            assert (await g.post(body=wish))[0] == 400
            assert not engine.no_usage_option

            async def strict(request: web.Request) -> web.StreamResponse:
                body = json.loads(await request.read())
                if "stream_options" in body:
                    return web.json_response(error, status=400)
                return await streamed(request, events(Dialect.CHAT, body))

            g.engine.handler = strict
            assert (await g.post(body=wish))[0] == 200
            assert engine.no_usage_option

            g.engine.handler = answers(404, b'{"detail": "Not Found"}')
            assert (await g.ask(Dialect.MESSAGES))[0] in {404, 501}
            assert not engine.deaf, "chat completions are not there either"

    run(story())


def test_one_broken_connection_does_not_put_an_engine_aside(make_settings: MakeSettings) -> None:
    async def story() -> None:
        async with ground(make_settings()) as g:
            engine = g.app.routes.engine(g.engine.url)
            aside: list[str] = []
            engine.unreachable = aside.append  # type: ignore[method-assign]
            left = [1]

            async def once(request: web.Request) -> web.StreamResponse:
                if left[0]:
                    left[0] -= 1
                    assert request.transport is not None
                    request.transport.close()
                return await g.engine.well(request)

            g.engine.handler = once
            assert (await g.ask())[0] == 200
            assert not aside
            left[0] = 2
            assert (await g.ask())[0] == 200
            assert len(aside) == 1

    run(story())


def test_half_a_character_is_passed_on_as_it_came(make_settings: MakeSettings) -> None:
    async def story() -> None:
        async with ground(make_settings()) as g:
            wish = request(Dialect.CHAT)
            wish["messages"] = [{"role": "user", "content": "cut \ud83d"}]
            raw = json.dumps(wish).encode()
            g.engine.handler = answers(
                200, b'{"choices": [{"message": {"content": "\\ud83d"}, "logprobs": {"x": NaN}}]}'
            )
            assert (await g.post(data=raw))[0] == 200
            assert g.engine.seen[-1][2] == raw

    run(story())
