"""The table of models: what may be written, what is told, and what the command line makes of it."""

from __future__ import annotations

import json
import threading

import pytest
from typer.testing import CliRunner

from app.cli.models import models
from app.errors import LimitInvalid, UnknownName
from app.ledger import model_replicas as ledger
from app.ledger.database import Database, Listener
from app.ledger.model_replicas import NewReplica
from app.models.model_calls import Dialect
from tests.integration.rows import facts
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


def test_an_engine_is_a_models_once(database: Database) -> None:
    ledger.add(database, NewReplica("m", ONE))
    ledger.add(database, NewReplica("other", ONE))
    with pytest.raises(LimitInvalid, match="swap"):
        ledger.add(database, NewReplica("m", ONE + "/"))


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


def test_writers_at_the_same_time_add_an_engine_once(database: Database) -> None:
    refused: list[Exception] = []

    def add() -> None:
        try:
            ledger.add(database, NewReplica("m", ONE))
        except LimitInvalid as error:
            refused.append(error)

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7
    assert _urls(database, "m") == {ONE: "active"}


def test_every_change_is_told(database: Database) -> None:
    listener = Listener(database, ledger.CHANGED)
    assert listener.wait(0) is None
    for change in (
        lambda: ledger.add(database, NewReplica("m", ONE)),
        lambda: ledger.drain(database, "m"),
        lambda: ledger.swap(database, "m", policy_version="v"),
        lambda: ledger.remove(database, "m"),
    ):
        change()
        assert listener.wait(10) == ["m"]
    listener.close()


def test_the_command_line(make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make_settings()
    monkeypatch.setattr("app.client.load", lambda: settings)
    said = CliRunner()

    def run(*words: str) -> str:
        done = said.invoke(models, list(words), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    assert "answers" in run(
        "add", "m", ONE, "--as", "own", "--version", "v1", "--speaks", "chat", "--speaks", "messages", "--no-check"
    )
    run("add", "*", TWO, "--api-key-env", "ENGINE_KEY", "--no-check")
    (star, m) = json.loads(run("list", "--json"))
    assert (m["url"], m["dialects"], m["policy_version"]) == (ONE, ["chat/completions", "messages"], "v1")
    assert (star["model"], star["api_key_env"]) == ("*", "ENGINE_KEY")
    assert "found out" in run("list")
    assert "no new attempts" in run("drain", "m")
    assert "takes new" in run("resume", "m", ONE)
    assert "v2" in run("swap", "m", "--version", "v2")
    assert json.loads(run("remove", "m", "--json"))[0]["url"] == ONE
    with pytest.raises(LimitInvalid, match="responses"):
        said.invoke(models, ["add", "m", ONE, "--speaks", "klingon"], catch_exceptions=False)
