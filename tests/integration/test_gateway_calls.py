"""Calls through the gateway: who may, what is passed on, what is on record."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from app.models.model_calls import CallEnd, Dialect
from app.models.spec import ModelChoice
from app.workers.model_access import GatewayClient
from tests.integration.gateway_fixture import (
    MODEL,
    an_attempt,
    answers,
    end_attempt,
    events,
    fixture,
    pauses,
    request,
    whole,
)
from tests.services import MakeSettings


async def test_a_call_is_passed_on_byte_by_byte_and_kept(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:
        for dialect in Dialect:
            g.anew()
            odd = json.dumps(request(dialect, temperature=0.25), indent=3, ensure_ascii=False).encode()
            answer = json.dumps(whole(dialect, request(dialect)), indent=2).encode()

            g.engine.handler = answers(200, answer, {"x-request-id": "up-1"})
            async with g.http.post(
                f"{g.url}/v1/{dialect.value}", data=odd, headers={"x-api-key": "t1", "anthropic-beta": "b1"}
            ) as said:
                assert said.status == 200
                assert said.headers["x-request-id"] == "up-1"
                assert await said.read() == answer
            path, headers, body = g.engine.seen[-1]
            assert (path, body) == (dialect.value, odd)
            assert headers["anthropic-beta"] == "b1"
            assert "x-api-key" not in headers
            assert "authorization" not in headers
            assert "x-megaflow-task" not in headers, "only our own engine is told of the task"
            await g.notes.until(1)
            kept = g.notes.last
            assert (kept.request, kept.response, kept.end) == (odd, answer, CallEnd.ANSWERED)
            assert (kept.dialect, kept.status, kept.streamed) == (dialect, 200, False)
            assert (kept.replica, kept.upstream_model) == (g.engine.url, MODEL)
            assert kept.waited_s == {}
            assert 0 < (kept.first_byte_s or 0) <= kept.duration_s


async def test_a_stream_is_passed_on_byte_by_byte_as_it_comes(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:
        for dialect in Dialect:
            g.anew()
            wish = request(dialect, stream=True)
            if dialect is Dialect.CHAT:
                wish["stream_options"] = {"include_usage": True}
            pieces = events(dialect, wish)
            half = len(b"".join(pieces)) // 2
            first, rest = b"".join(pieces)[:half], b"".join(pieces)[half:]  # cut anywhere, not between events
            go_on = asyncio.Event()

            g.engine.handler = pauses(first, rest, go_on)
            headers = {"Authorization": "Bearer t1"}
            async with g.http.post(f"{g.url}/v1/{dialect.value}", json=wish, headers=headers) as said:
                assert await said.content.readexactly(len(first)) == first, "before the engine has said the rest"
                go_on.set()
                assert await said.read() == rest
            await g.notes.until(1)
            assert g.notes.last.response == first + rest
            assert g.notes.last.streamed
            assert g.notes.last.end is CallEnd.ANSWERED


async def test_the_usage_of_a_chat_stream_is_asked_for_and_not_shown(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:
        status, said = await g.post(body=request(Dialect.CHAT, stream=True))
        assert status == 200
        assert b'"usage"' not in said
        assert said.endswith(b"data: [DONE]\n\n")
        assert g.engine.last["stream_options"] == {"include_usage": True}
        await g.notes.until(1)
        assert b'"usage"' in g.notes.last.response
        assert "stream_options" not in json.loads(g.notes.last.request)


async def test_clients_differ_in_how_they_write_the_base_url(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:
        for path in ("/chat/completions", "/v1/chat/completions", "/v1/v1/chat/completions"):
            g.anew()
            status, _ = await g.post(path, request(Dialect.CHAT))
            assert status == 200


async def test_a_wrong_token_is_refused_in_the_callers_dialect(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:
        for dialect in Dialect:
            g.anew()
            for token in ("wrong", "x" * 5000):
                status, said = await g.ask(dialect, token=token)
                assert status == 401
                assert "token" in said["error"]["message"]
                assert token not in json.dumps(said)
            async with g.http.post(f"{g.url}/v1/{dialect.value}", json=request(dialect)) as answer:
                assert answer.status == 401
            assert g.engine.seen == []


async def test_an_ended_attempt_is_refused_soon(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:
        claim = await asyncio.to_thread(an_attempt, g.database, "t2")
        assert (await g.ask(token="t2"))[0] == 200
        await asyncio.to_thread(end_attempt, g.database, claim)
        while (said := await g.ask(token="t2"))[0] == 200:
            await asyncio.sleep(0.1)
        assert said[0] == 403
        assert "ended" in said[1]["error"]["message"]
        assert (await g.ask())[0] == 200, "the others go on"
        async with g.http.get(f"{g.url}/megaflow/session", headers={"x-api-key": "t2"}) as account:
            assert account.status == 200, "what it had is told all the same"


async def test_models_are_listed_for_both_families_of_clients(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:
        await g.add(g.engine.url, model="third")
        own = ModelChoice(name=MODEL, side_models=("other",))
        await asyncio.to_thread(an_attempt, g.database, "t2", model=own)
        headers = {"Authorization": "Bearer t2"}
        async with g.http.get(f"{g.url}/v1/models", headers=headers) as answer:
            said = await answer.json()
            assert [one["id"] for one in said["data"]] == [MODEL, "other"]
            assert (said["object"], said["first_id"], said["last_id"]) == ("list", MODEL, "other")
        async with g.http.get(f"{g.url}/v1/models/other", headers=headers) as answer:
            assert (await answer.json())["type"] == "model"
        async with g.http.get(f"{g.url}/v1/models/third", headers=headers | {"anthropic-version": "1"}) as answer:
            assert answer.status == 404
            assert (await answer.json())["type"] == "error"
        async with g.http.get(f"{g.url}/v1/models") as answer:
            assert answer.status == 401


async def test_our_own_engine_is_told_of_task_and_attempt(make_settings: MakeSettings) -> None:
    async with fixture(make_settings(), replica=False) as g:
        g.app._settings = make_settings(replay_port=g.engine.port)
        g.app.routes._settings = g.app._settings
        await asyncio.to_thread(an_attempt, g.database, "t2", model=ModelChoice(name="replay"))
        assert (await g.ask(Dialect.MESSAGES, token="t2", model="replay"))[0] == 200
        headers = g.engine.seen[-1][1]
        assert headers["x-megaflow-task"] == "task-t2"
        assert headers["x-megaflow-replica"] == "0"
        assert headers["x-megaflow-attempt"]


MALFORMED = [
    (b'{"model": "m", ', "JSON"),
    (b"", "empty"),
    (b"[1]", "list"),
    (b'{"messages": []}', "model"),
    (b'{"model": 3}', "3"),
    (b"\xff\xfe", "JSON"),
]


async def test_a_malformed_request_is_refused_with_what_was_found(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:
        for sent, found in MALFORMED:
            g.anew()
            for dialect in Dialect:
                status, content = await g.post(f"/v1/{dialect.value}", data=sent)
                assert status == 400
                assert found in json.loads(content)["error"]["message"]
            await g.notes.until(3)
            assert g.notes.ends == {CallEnd.REFUSED: 3}
            assert g.engine.seen == []


async def fifty_megabytes() -> AsyncIterator[bytes]:
    piece = b"x" * (1 << 20)
    for _ in range(50):
        yield piece


async def test_a_huge_request_is_refused_without_being_kept(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:
        for told in (True, False):
            g.anew()
            headers = {"Authorization": "Bearer t1"} | ({"Content-Length": str(50 << 20)} if told else {})
            async with g.http.post(f"{g.url}/v1/messages", data=fifty_megabytes(), headers=headers) as answer:
                assert answer.status == 413
                assert "33,554,432" in (await answer.json())["error"]["message"]
            await g.notes.until(1)
            assert g.notes.last.end is CallEnd.REFUSED
            assert g.notes.last.request == b""
            assert (await g.ask())[0] == 200


async def test_a_worker_closes_the_session_when_all_is_on_record(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:
        inside, go_on = asyncio.Event(), asyncio.Event()

        async def handler(request: web.Request) -> web.StreamResponse:
            inside.set()
            await go_on.wait()
            return await g.engine.well(request)

        g.engine.handler = handler
        call = asyncio.create_task(g.ask())
        await inside.wait()
        client = GatewayClient(g.url, "t1")
        closing = asyncio.create_task(asyncio.to_thread(client.close, 20.0))
        await g.knows(lambda: any(one.closed for one in g.app.services.attempts._by_id.values()))
        assert (await g.ask())[0] == 403, "no more are taken"
        assert not closing.done()
        go_on.set()
        assert (await call)[0] == 200
        with client:
            account = await closing
        assert account is not None
        assert (account.calls, account.turns, account.prompt_tokens) == (1, 1, 100)
        assert g.notes.flushed


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_stops_the_engine(make_settings: MakeSettings, stream: bool) -> None:
    async with fixture(make_settings()) as g:
        inside, stopped = asyncio.Event(), asyncio.Event()

        async def handler(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            try:
                if stream:
                    await response.prepare(request)
                    await response.write(b"data: {}\n\n")
                inside.set()
                await asyncio.sleep(60)
            finally:
                stopped.set()
            return response

        g.engine.handler = handler
        call = asyncio.create_task(g.post(body=request(Dialect.CHAT, stream=stream)))
        await inside.wait()
        if stream:
            await g.knows(lambda: g.app.services.attempts.in_flight > 0)
        call.cancel()
        await stopped.wait()
        await g.notes.until(1)
        assert g.notes.last.end is CallEnd.CLIENT_GONE
        assert g.notes.last.streamed is stream
        assert g.app.routes.engine(g.engine.url).window.inside == 0
        g.engine.handler = g.engine.well
        assert (await g.ask())[0] == 200


async def test_metrics_and_health_are_told(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:
        assert (await g.ask(Dialect.MESSAGES))[0] == 200
        await g.notes.until(1)
        async with g.http.get(f"{g.url}/metrics") as answer:
            said = await answer.text()
        assert 'megaflow_gateway_calls_total{dialect="messages",end="answered"} 1.0' in said
        assert f'megaflow_gateway_engine_up{{engine="{g.engine.url}"}} 1.0' in said
        assert 'megaflow_gateway_tokens_total{kind="prompt"} 100.0' in said
        async with g.http.get(f"{g.url}/health") as answer:
            told = await answer.json()
        assert (told["status"], told["engines"]) == ("ok", {"up": 1, "away": 0})
