"""Sampling options of a submission: in every call, in each dialect, instead of the agent's own, and on record."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from app.models.model_calls import Dialect
from app.models.spec import ModelChoice, Sampling, TaskSpec
from tests.building import a_task
from tests.integration.gateway_ground import MODEL, an_attempt, ground
from tests.services import MakeSettings

ALL = Sampling(temperature=0.25, top_p=0.5, max_tokens=64, seed=7)
OWN = {"temperature": 1.0, "top_p": 0.9}
BOUND = {Dialect.CHAT: "max_tokens", Dialect.RESPONSES: "max_output_tokens", Dialect.MESSAGES: "max_tokens"}


@pytest.mark.parametrize("dialect", list(Dialect))
async def test_options_replace_the_agents_own_in_each_dialect(make_settings: MakeSettings, dialect: Dialect) -> None:
    async with ground(make_settings(), attempt=False) as g:
        model = ModelChoice(name=MODEL, sampling=ALL)
        await asyncio.to_thread(an_attempt, g.database, "t1", model=model)
        assert (await g.ask(dialect, **OWN, **{BOUND[dialect]: 1000}))[0] == 200
        asked = g.engine.last
        assert (asked["temperature"], asked["top_p"], asked[BOUND[dialect]]) == (0.25, 0.5, 64)
        seed = {"seed": 7} if dialect is Dialect.CHAT else {}
        assert {key: asked[key] for key in ("seed",) if key in asked} == seed
        assert g.notes.last.sampled.describe() == {
            "applied": {"temperature": 0.25, "top_p": 0.5, "max_tokens": 64} | seed,
            "dropped": [] if seed else ["seed"],
        }


async def test_an_attempts_own_bound_holds_and_nothing_changes_without_options(make_settings: MakeSettings) -> None:
    async with ground(make_settings()) as g:
        assert (await g.ask(**OWN))[0] == 200
        assert (g.engine.last["temperature"], "seed" in g.engine.last) == (1.0, False)
        assert not g.notes.last.sampled
        model = ModelChoice(name=MODEL, sampling=Sampling(max_tokens=500))
        await asyncio.to_thread(an_attempt, g.database, "t2", model=model, max_turn_tokens=100)
        assert (await g.ask(token="t2"))[0] == 200
        assert g.engine.last["max_tokens"] == 100


async def test_an_option_that_the_model_does_not_take_is_dropped_and_that_is_recorded(
    make_settings: MakeSettings,
) -> None:
    async with ground(make_settings(), attempt=False) as g:
        model = ModelChoice(name=MODEL, sampling=Sampling(temperature=0.25, top_p=0.5))
        await asyncio.to_thread(an_attempt, g.database, "t1", model=model)
        well = g.engine.well

        async def strict(request: web.Request) -> web.StreamResponse:
            if "temperature" in g.engine.last:
                said = "Unsupported parameter: 'temperature' is not supported with this model."
                return web.json_response({"error": {"message": said, "code": "unsupported_parameter"}}, status=400)
            return await well(request)

        g.engine.handler = strict
        for _ in range(2):
            assert (await g.ask())[0] == 200
            assert g.notes.last.sampled.describe() == {"applied": {"top_p": 0.5}, "dropped": ["temperature"]}
        assert len(g.engine.seen) == 3, "asked once in vain, then it is known"


def test_a_submission_without_options_keeps_its_digest() -> None:
    def digest(**more: Any) -> str:
        return TaskSpec(task=a_task(), agent="nop", model=ModelChoice(name="m", **more)).digest()

    assert "sampling" not in ModelChoice(name="m").model_dump_json()
    assert digest() == digest(sampling=None) != digest(sampling=ALL)
    assert ModelChoice.model_validate_json(ModelChoice(name="m", sampling=ALL).model_dump_json()).sampling == ALL
