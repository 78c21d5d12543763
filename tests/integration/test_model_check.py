"""Endpoint, key and model are checked by the gateway before anything is submitted or registered."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import typer
from aiohttp import web
from typer.testing import CliRunner

from app.cli import models, schedules, submit
from app.client import MegaFlow
from app.errors import ModelEndpointUnavailable
from app.ledger import model_replicas
from app.ledger.database import Database
from app.ledger.model_sessions import new_token
from app.model_service.checking import check_model
from app.models.spec import ModelChoice
from app.settings import Settings
from tests.integration.gateway_ground import Ground, ground
from tests.integration.rows import one
from tests.services import MakeSettings

DEAD = "http://127.0.0.1:1/v1"
KEYS = {"GOOD_API_KEY": "sk-good-key"}


async def _checked(g: Ground, model: ModelChoice, **candidate: Any) -> list[str]:
    """What the gateway warns of. Raises: ModelEndpointUnavailable."""
    settings = g.settings.model_copy(update={"gateway_url": (g.url,)})
    return await asyncio.to_thread(check_model, settings, g.database, model, candidate or None)


async def _refused(g: Ground, model: ModelChoice, *said: str, **candidate: Any) -> None:
    with pytest.raises(ModelEndpointUnavailable) as refused:
        await _checked(g, model, **candidate)
    for words in (*said, "--no-check"):
        assert words in str(refused.value)
    assert "sk-good-key" not in str(refused.value)


def checked(settings: Settings) -> AbstractAsyncContextManager[Ground]:
    return ground(settings, replica=False, keys=KEYS)


async def test_a_dead_url_a_refused_key_and_an_unknown_model_are_refused(make_settings: MakeSettings) -> None:
    async with checked(make_settings()) as g:
        await _refused(g, ModelChoice(name="m", base_url=DEAD), DEAD, "takes no connections")
        own = ModelChoice(name="m", base_url=g.engine.url)
        for status in (401, 403):
            g.engine.models = status
            await _refused(g, own, f"answers {status}", "no key was sent", f"add NAME {g.engine.url} --api-key-env")
        g.engine.models = [f"other-{n:02}" for n in range(12)]
        await _refused(g, own, "does not have the model 'm'", "other-00, other-01", "2 more")
        g.engine.models = ["m"]
        assert await _checked(g, own) == []
        side = own.model_copy(update={"side_models": ("small",)})
        await _refused(g, side, "does not have the model 'small'")
        assert not g.engine.seen, "a list answers without a call"


async def test_a_key_that_the_gateway_does_not_have_is_refused_before_the_engine_is_asked(
    make_settings: MakeSettings,
) -> None:
    async with checked(make_settings()) as g:
        await g.add(g.engine.url, "writer-2", api_key_env="MISSING_API_KEY")
        await _refused(g, ModelChoice(name="writer-2"), "variable MISSING_API_KEY, found none", "`megaflow up`")
        assert not g.engine.keys
        await asyncio.to_thread(model_replicas.remove, g.database, "writer-2")
        await asyncio.to_thread(
            model_replicas.add,
            g.database,
            model_replicas.NewReplica("writer-2", g.engine.url, api_key_env="GOOD_API_KEY"),
        )
        g.engine.models = ["writer-2"]
        assert await _checked(g, ModelChoice(name="writer-2")) == [], "a new row is known at once"
        assert g.engine.keys == ["Bearer sk-good-key"]
        g.engine.models = 401
        await _refused(g, ModelChoice(name="writer-2"), "the key in GOOD_API_KEY is not accepted")


async def test_without_a_list_the_model_is_called_for_one_token(make_settings: MakeSettings) -> None:
    async with checked(make_settings()) as g:
        own = ModelChoice(name="m", base_url=g.engine.url)
        g.engine.models = 404
        assert await _checked(g, own) == []
        assert (g.engine.last["model"], g.engine.last["max_tokens"]) == ("m", 1)

        def answers(status: int, message: str) -> None:
            async def handler(request: web.Request) -> web.StreamResponse:
                return web.json_response({"error": {"message": message}}, status=status)

            g.engine.handler = handler

        answers(404, "The model `m` does not exist")
        await _refused(g, own, "does not have the model 'm'")
        answers(404, "no such page")
        await _refused(g, own, "is no model server", "/v1")
        answers(401, "who are you")
        await _refused(g, own, "who are you")
        answers(500, "out of order")
        (warning,) = await _checked(g, own)
        assert "out of order" in warning


async def test_of_several_engines_one_that_answers_is_enough(make_settings: MakeSettings) -> None:
    async with checked(make_settings()) as g:
        g.engine.models = ["writer-2"]
        await g.add(g.engine.url, "writer-2")
        await g.add(DEAD, "writer-2")
        (warning,) = await _checked(g, ModelChoice(name="writer-2"))
        assert DEAD in warning


async def test_a_redirect_of_the_list_is_not_followed(make_settings: MakeSettings) -> None:
    async with checked(make_settings()) as g:
        g.engine.models = 302
        await _refused(g, ModelChoice(name="m", base_url=g.engine.url), "redirect")


async def test_what_a_call_would_be_refused_for_is_refused_by_the_check(make_settings: MakeSettings) -> None:
    async with checked(make_settings()) as g:
        await _refused(g, ModelChoice(name="nobody-has-it"), "no engine answers for it")
        theft = ModelChoice(name="m", base_url=g.engine.url, api_key_env="GOOD_API_KEY")
        await _refused(g, theft, "is not registered")
        assert not g.engine.keys


async def test_an_engine_is_checked_before_it_is_registered(make_settings: MakeSettings) -> None:
    async with checked(make_settings()) as g:
        new = {"url": g.engine.url, "api_key_env": "GOOD_API_KEY", "upstream_model": "own-name"}
        g.engine.models = ["m"]
        await _refused(g, ModelChoice(name="m"), "'own-name'", **new)
        assert await _checked(g, ModelChoice(name="m"), **(new | {"upstream_model": None})) == []
        assert await _checked(g, ModelChoice(name="*"), **(new | {"upstream_model": None})) == []
        assert set(g.engine.keys) == {"Bearer sk-good-key"}


async def test_a_control_token_is_good_once_and_an_attempts_token_never(make_settings: MakeSettings) -> None:
    async with checked(make_settings()) as g:
        body = {"model": {"name": "m", "base_url": g.engine.url}}
        g.engine.models = ["m"]
        assert (await g.post("/megaflow/check", body, token="t1"))[0] == 401
        assert (await g.post("/megaflow/check", body, token="made-up"))[0] == 401
        token = await asyncio.to_thread(new_token, g.database)
        assert (await g.post("/megaflow/check", body, token=token))[0] == 200
        assert (await g.post("/megaflow/check", body, token=token))[0] == 401
        assert len(g.engine.keys) == 1
        token = await asyncio.to_thread(new_token, g.database)
        assert (await g.post("/megaflow/check", {"model": 3}, token=token))[0] == 400


# --- Commands -------------------------------------------------------------------------------------------------------

ASKED = ("--agent", "mini-swe-agent", "--environment", "local", "--limit", "1", "--model", "m", "--base-url", DEAD)
COMMANDS = [
    ("submit", "demo", *ASKED),
    ("submit", "demo", "--dry-run", *ASKED),
    ("schedule", "add", "nightly", "0 3 * * *", "demo", *ASKED),
    ("models", "add", "m", DEAD),
]


def _command(settings: Settings, monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.setattr("app.client.load", lambda: settings)
    cli = typer.Typer()
    for group in (submit, schedules, models):
        group.register(cli)
    result = CliRunner().invoke(cli, words)
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.mark.parametrize("words", COMMANDS)
async def test_a_dead_url_is_refused_by_each_command_that_takes_one(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    async with checked(make_settings()) as g:
        settings = g.settings.model_copy(update={"gateway_url": (g.url,)})
        before = _rows(g.database)
        with pytest.raises(ModelEndpointUnavailable, match="takes no connections"):
            await asyncio.to_thread(_command, settings, monkeypatch, *words)
        assert _rows(g.database) == before
        await asyncio.to_thread(_command, settings, monkeypatch, *words, "--no-check")
        assert ("--dry-run" in words) is (_rows(g.database) == before)


def _rows(database: Database) -> Any:
    counted = "(SELECT count(*) FROM tasks) AS tasks, (SELECT count(*) FROM schedules) AS schedules"
    return one(database, f"SELECT {counted}, (SELECT count(*) FROM model_replicas) AS replicas")


@pytest.mark.parametrize("words", COMMANDS)
def test_without_a_gateway_the_command_says_how_to_start_it(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    settings = make_settings(gateway_url="http://127.0.0.1:1")
    with pytest.raises(ModelEndpointUnavailable, match=r"does not answer.*`megaflow up`, or --no-check"):
        _command(settings, monkeypatch, *words)


def test_models_of_the_replay_engine_and_producers_need_no_gateway(make_settings: MakeSettings) -> None:
    with MegaFlow(make_settings(gateway_url="http://127.0.0.1:1")) as flow:
        assert flow.check_model("replay") == flow.check_model("replay:night") == []
        with pytest.raises(ModelEndpointUnavailable):
            flow.check_model(ModelChoice(name="m", base_url=DEAD))
