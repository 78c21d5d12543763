"""An attempt's token is good for the model of its task, and for those that were submitted beside it."""

from __future__ import annotations

import asyncio
import json

import pytest

from app.models.model_calls import CallEnd, Dialect
from app.models.spec import ModelChoice
from tests.integration.gateway_fixture import MODEL, an_attempt, fixture, request
from tests.services import MakeSettings

DEAR = "dear-model"


@pytest.mark.parametrize("dialect", Dialect)
async def test_a_token_calls_no_other_model(make_settings: MakeSettings, dialect: Dialect) -> None:
    async with fixture(make_settings()) as g:
        await g.add(g.engine.url, DEAR)
        status, said = await g.ask(dialect, model=DEAR)
        assert (status, g.engine.seen) == (403, [])
        assert f"may call '{MODEL}', found '{DEAR}'" in said["error"]["message"]
        assert ("type" in said) is (dialect is Dialect.MESSAGES), "in the caller's dialect"
        assert (g.notes.last.end, g.notes.last.asked_model, g.notes.last.status) == (CallEnd.REFUSED, DEAR, 403)
        assert (await g.ask(dialect))[0] == 200


async def test_a_token_calls_no_other_model_of_the_settings_endpoint(make_settings: MakeSettings) -> None:
    async with fixture(make_settings(), replica=False) as g:
        own = ModelChoice(name="cheap", base_url=g.engine.url)
        await asyncio.to_thread(an_attempt, g.database, "t2", model=own)
        assert (await g.ask(token="t2", model=DEAR))[0] == 403
        assert (await g.ask(token="t2", model="cheap "))[0] == 403
        assert (await g.ask(token="t2", model="cheap"))[0] == 200
        assert [json.loads(body)["model"] for _, _, body in g.engine.seen] == ["cheap"]


async def test_a_token_counts_no_tokens_of_another_model(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:
        await g.add(g.engine.url, DEAR)
        asked = request(Dialect.MESSAGES, model=DEAR)
        assert (await g.post("/v1/messages/count_tokens", asked))[0] == 403
        assert not g.engine.seen


async def test_a_side_model_is_allowed_by_the_submission(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:
        await g.add(g.engine.url, "small")
        await g.add(g.engine.url, DEAR)
        allowed = ModelChoice(name=MODEL, side_models=("small",))
        await asyncio.to_thread(an_attempt, g.database, "t2", model=allowed)
        assert (await g.ask(token="t2", model="small"))[0] == 200
        assert (await g.ask(token="t2", model=DEAR))[0] == 403
