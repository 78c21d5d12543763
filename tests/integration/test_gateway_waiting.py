"""Calls that wait for a full engine, and what the engine is told of their order."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from app.model_service.gateway.waiting import LEVEL_S
from app.models.engines import EngineKind
from app.models.model_calls import Account, CallEnd
from tests.integration.gateway_ground import Ground, an_attempt, ground
from tests.services import MakeSettings


async def _had(g: Ground, token: str, model_s: float) -> None:
    """A running attempt whose calls were at engines for that long."""
    claim = await asyncio.to_thread(an_attempt, g.database, token)
    g.notes.accounts[claim.attempt_id] = Account(calls=9, turns=9, model_s=model_s, offered_tools=True)


async def test_an_attempt_that_had_little_passes_those_that_had_much(make_settings: MakeSettings) -> None:
    async with ground(make_settings()) as g:
        engine = g.app.routes.engine(g.engine.url)
        engine.window.size = 0
        calls = []
        for number, (token, model_s) in enumerate((("long", 900.0), ("middle", 90.0), ("short", 0.0))):
            await _had(g, token, model_s)
            calls.append(asyncio.create_task(g.ask(token=token, user=token)))
            await g.knows(lambda number=number: engine.window.waiting == number + 1)
        engine.window.size = 1
        engine.window._admit()
        assert [status for status, _ in await asyncio.gather(*calls)] == [200, 200, 200]
        assert [json.loads(body)["user"] for _, _, body in g.engine.seen] == ["short", "middle", "long"]
        assert not any("priority" in json.loads(body) for _, _, body in g.engine.seen), "of an unknown kind"
        assert engine.window.inside == 0
        [share] = g.app.services.upstream.shares._known.values()
        assert (share.calls, share.tokens) == (0, 330)


@pytest.mark.parametrize(("kind", "sign"), [(EngineKind.VLLM, 1), (EngineKind.SGLANG, -1)])
async def test_engines_with_a_priority_are_told_of_it(make_settings: MakeSettings, kind: EngineKind, sign: int) -> None:
    async with ground(make_settings()) as g:
        await _had(g, "long", 4 * LEVEL_S)
        assert (await g.ask(token="long"))[0] == 200
        assert "priority" not in g.engine.last
        await g.add(g.engine.url, "other", engine=kind)
        own = g.app.routes._table["other"]
        g.app.routes._table = dict.fromkeys(g.app.routes._table, own)
        assert (await g.ask(token="long", priority=-77))[0] == 200
        assert g.engine.last["priority"] == sign * 3, "the agent's own wish is no way past the others"


async def test_an_engine_that_refuses_a_priority_is_asked_again_without_and_not_told_any_more(
    make_settings: MakeSettings,
) -> None:
    async with ground(make_settings()) as g:
        await g.add(g.engine.url, "other", engine=EngineKind.VLLM)
        own = g.app.routes._table["other"]
        g.app.routes._table = dict.fromkeys(g.app.routes._table, own)

        async def first_come_first_served(request: web.Request) -> web.StreamResponse:
            if "priority" in json.loads(await request.read()):
                error = {"message": "a priority was given, but the scheduler does not go by it"}
                return web.json_response({"error": error}, status=400)
            return await g.engine.well(request)

        g.engine.handler = first_come_first_served
        assert [(await g.ask())[0] for _ in range(3)] == [200, 200, 200]
        assert ["priority" in json.loads(body) for _, _, body in g.engine.seen] == [True, False, False, False]
        await g.notes.until(3)
        assert g.notes.ends == {CallEnd.ANSWERED: 3}
        assert [one.retries for one in g.notes.exchanges] == [0, 0, 0]
