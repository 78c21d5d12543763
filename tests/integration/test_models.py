"""The table of models, and what the gateway checks before anything is registered or submitted."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from app.errors import LimitInvalid, ModelEndpointUnavailable, UnknownName
from app.ledger import model_replicas
from app.ledger import model_replicas as ledger
from app.ledger.database import Database
from app.ledger.model_replicas import NewReplica
from app.ledger.model_sessions import new_token
from app.model_service.checking import check_engine
from app.models.model_calls import Dialect
from app.models.spec import ModelChoice
from app.settings import Settings
from tests.integration.command import CommandLine
from tests.integration.gateway_fixture import Fixture, fixture
from tests.integration.rows import facts, one
from tests.services import MakeSettings

ONE, TWO = "http://one.engine.test:8000/v1", "http://two.engine.test:8000/v1"


def _urls(database: Database, model: str) -> dict[str, str]:
    with database.begin() as connection:
        return {one.url: one.state for one in ledger.listed(connection, model)}


def test_what_is_added_is_listed_as_it_was_said(database: Database) -> None:
    new = NewReplica("m", ONE + "/", "own-name", "v1", (Dialect.CHAT, Dialect.MESSAGES), "ENGINE_KEY", 32768)
    made = ledger.add(database, new)
    with database.begin() as connection:
        assert ledger.listed(connection) == ledger.listed(connection, "m") == [made]
        assert ledger.listed(connection, "other") == []
    assert (made.url, made.upstream_model, made.policy_version) == (ONE, "own-name", "v1")
    assert made.dialects == (Dialect.CHAT, Dialect.MESSAGES)
    assert (made.api_key_env, made.context_tokens, made.state) == ("ENGINE_KEY", 32768, "active")
    assert facts(database)[-1] == ("model.added", {"model": "m", "url": ONE, "version": "v1"})


def test_what_cannot_be_is_refused_and_secrets_are_not_shown(database: Database) -> None:
    for new in (
        NewReplica("", ONE),
        NewReplica("m", "engine.test/v1"),
        NewReplica("m", "ftp://engine.test"),
        NewReplica("m", "http://engine.test:99999/v1"),
        NewReplica("m", "http://engine.test/v1?key=1"),
        NewReplica("m", "http://user:hidden-word@engine.test/v1"),
        NewReplica("m", ONE, api_key_env="sk-hidden-word"),
        NewReplica("m", ONE, api_key_env="MEGAFLOW_DATABASE_URL"),
        NewReplica("m", ONE, api_key_env="AWS_SECRET_ACCESS_KEY"),
        NewReplica("m", ONE, api_key_env="EDITOR"),
        NewReplica("m", "http://169.254.169.254/v1"),
        NewReplica("m", ONE, context_tokens=0),
    ):
        with pytest.raises(LimitInvalid) as refused:
            ledger.add(database, new)
        assert "hidden-word" not in str(refused.value)
        assert _urls(database, new.model) == {}


def test_drained_resumed_removed(database: Database) -> None:
    ledger.add(database, NewReplica("m", ONE))
    ledger.add(database, NewReplica("m", TWO))
    assert [one.url for one in ledger.drain(database, "m", ONE)] == [ONE]
    assert _urls(database, "m") == {ONE: "draining", TWO: "active"}
    ledger.resume(database, "m")
    assert _urls(database, "m") == {ONE: "active", TWO: "active"}
    ledger.remove(database, "m", TWO)
    assert _urls(database, "m") == {ONE: "active"}
    with pytest.raises(UnknownName, match=r"one\.engine\.test"):
        ledger.drain(database, "m", TWO)
    with pytest.raises(UnknownName, match="known: m"):
        ledger.remove(database, "n")


def test_a_version_is_swapped_behind_its_name(database: Database) -> None:
    ledger.add(database, NewReplica("m", ONE, "a", "v1", api_key_env="A_KEY", dialects=(Dialect.CHAT,)))
    ledger.add(database, NewReplica("m", TWO, "a", "v1"))
    now = ledger.swap(database, "m", policy_version="v2", upstream_model="b")
    assert {(one.url, one.upstream_model, one.policy_version) for one in now} == {(ONE, "b", "v2"), (TWO, "b", "v2")}
    ledger.drain(database, "m", TWO)
    now = ledger.swap(database, "m", policy_version="v3")
    assert {(one.url, one.policy_version) for one in now} == {(ONE, "v3"), (TWO, "v2")}
    with pytest.raises(UnknownName, match="known: m"):
        ledger.swap(database, "n", policy_version="v1")


def test_the_command_line(megaflow: CommandLine) -> None:
    spoken = ("--speaks", "chat", "--speaks", "messages")
    assert "was added unseen" in megaflow(
        "models", "add", "m", ONE, "--as", "own", "--version", "v1", *spoken, "--no-check"
    )
    megaflow("models", "add", "*", TWO, "--api-key-env", "ENGINE_KEY", "--no-check")
    (star, m) = megaflow.json("models", "list")
    assert (m["url"], m["dialects"], m["policy_version"]) == (ONE, ["chat/completions", "messages"], "v1")
    assert (star["model"], star["api_key_env"]) == ("*", "ENGINE_KEY")
    assert "found out" in megaflow("models", "list")
    assert "no new attempts" in megaflow("models", "drain", "m")
    assert "takes new" in megaflow("models", "resume", "m", ONE)
    assert "v2" in megaflow("models", "swap", "m", "--version", "v2")
    assert megaflow.json("models", "remove", "m")[0]["url"] == ONE
    with pytest.raises(LimitInvalid, match="responses"):
        megaflow("models", "add", "m", ONE, "--speaks", "klingon")


DEAD = "http://127.0.0.1:1/v1"
KEYS = {"GOOD_API_KEY": "sk-good-key"}


async def _checked(g: Fixture, model: ModelChoice, **candidate: Any) -> list[str]:
    """What the gateway warns of. Raises: ModelEndpointUnavailable."""
    settings = g.settings.model_copy(update={"gateway_url": (g.url,)})
    return (await asyncio.to_thread(check_engine, settings, g.database, model, candidate or None))[0]


async def _refused(g: Fixture, model: ModelChoice, *said: str, **candidate: Any) -> None:
    with pytest.raises(ModelEndpointUnavailable) as refused:
        await _checked(g, model, **candidate)
    for words in (*said, "--no-check"):
        assert words in str(refused.value)
    assert "sk-good-key" not in str(refused.value)


def checked(settings: Settings) -> AbstractAsyncContextManager[Fixture]:
    return fixture(settings, replica=False, keys=KEYS)


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


ASKED = ("--agent", "mini-swe-agent", "--environment", "local", "--limit", "1", "--model", "m", "--base-url", DEAD)
COMMANDS = [
    ("submit", "demo", *ASKED),
    ("submit", "demo", "--dry-run", *ASKED),
    ("schedule", "add", "nightly", "0 3 * * *", "demo", *ASKED),
    ("models", "add", "m", DEAD),
]


async def test_a_dead_url_is_refused_by_each_command_that_takes_one(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with checked(make_settings()) as g:
        settings = g.settings.model_copy(update={"gateway_url": (g.url,)})
        for words in COMMANDS:
            before = _rows(g.database)
            with pytest.raises(ModelEndpointUnavailable, match="takes no connections"):
                await asyncio.to_thread(CommandLine(settings, monkeypatch), *words)
            assert _rows(g.database) == before
            await asyncio.to_thread(CommandLine(settings, monkeypatch), *words, "--no-check")
            assert ("--dry-run" in words) is (_rows(g.database) == before)


def _rows(database: Database) -> Any:
    counted = "(SELECT count(*) FROM tasks) AS tasks, (SELECT count(*) FROM schedules) AS schedules"
    return one(database, f"SELECT {counted}, (SELECT count(*) FROM model_replicas) AS replicas")


def test_without_a_gateway_the_command_says_how_to_start_it(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(gateway_url="http://127.0.0.1:1")
    for words in COMMANDS:
        with pytest.raises(ModelEndpointUnavailable, match=r"does not answer.*`megaflow up`, or --no-check"):
            CommandLine(settings, monkeypatch)(*words)
