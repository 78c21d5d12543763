"""What was used, added up in every way, and what `megaflow usage` shows of it."""

from __future__ import annotations

import json
from typing import Any, get_args
from uuid import UUID

import pytest
import typer
from sqlalchemy import Connection
from typer.testing import CliRunner

from app.cli import usage as command
from app.client import MegaFlow
from app.ledger import model_calls
from app.ledger.database import Database
from app.ledger.model_calls import NewCall, packed
from app.ledger.model_usage import UsageRow, usage
from app.models.kinds import UsageBy as By
from app.settings import Settings
from tests.building import new_id
from tests.integration.rows import a_run, a_task, ago, an_attempt


def a_call(run: UUID, task: UUID, attempt: UUID, **values: Any) -> NewCall:
    facts = {
        "id": new_id(),
        "attempt_id": attempt,
        "task_id": task,
        "run_id": run,
        "user_name": "alice",
        "dialect": "chat/completions",
        "model": "m",
        "upstream_model": "m",
        "replica": "",
        "policy_version": "",
        "started_at": ago(50),
        "duration_s": 2.0,
        "waited": {"model": 0.5},
        "streamed": False,
        "end_kind": "answered",
        "detail": "",
        "finish_reason": "stop",
        "retries": 0,
        "is_turn": True,
        "prompt_tokens": 1000,
        "completion_tokens": 10,
        "cached_tokens": 400,
        "cost_usd": 0.5,
        "messages": [],
        "body": packed({}),
    }
    return NewCall(facts | values)


@pytest.fixture
def used(database: Database) -> UUID:
    """Two tasks of a run: one with priced calls, one of an unknown price; and a task that called no model."""
    run = a_run(database, name="night", total=3)
    calls = []
    doors = {"image_ready": ago(100).isoformat(), "stored": ago(40).isoformat()}
    for name, agent, cost in (("cheap", "mini-swe-agent", 0.5), ("dear", "claude-code", None), ("plain", "oracle", 0)):
        task = a_task(database, run, name=name, agent=agent, state="succeeded", in_line=False)
        attempt = an_attempt(database, task, state="finished", claimed_at=ago(101), finished_at=ago(39), phases=doors)
        if agent != "oracle":
            calls += [a_call(run, task, attempt, cost_usd=cost, model=f"of-{agent}") for _ in range(2)]
    with database.begin() as connection:
        model_calls.store(connection, calls)
    return run


def _rows(database: Database, by: By, **given: Any) -> list[UsageRow]:
    def read(connection: Connection) -> list[UsageRow]:
        return usage(connection, by, **given)

    with database.begin() as connection:
        return read(connection)


def test_by_task(database: Database, used: UUID) -> None:
    cheap, dear, plain = _rows(database, "task", run_id=used)
    assert (cheap.key, cheap.calls, cheap.turns, cheap.prompt_tokens, cheap.cached_tokens) == (
        "cheap #0",
        2,
        2,
        2000,
        800,
    )
    assert (cheap.cost_usd, cheap.unpriced_calls, cheap.model_s, cheap.waited_s) == (1.0, 0, 3.0, 1.0)
    assert (dear.key, dear.cost_usd, dear.unpriced_calls) == ("dear #0", None, 2)
    assert (plain.key, plain.calls, plain.attempts, plain.environment_s) == ("plain #0", 0, 1, 60.0)


@pytest.mark.parametrize(
    ("by", "keys"),
    [
        ("run", ["night"]),
        ("user", ["alice"]),
        ("agent", ["mini-swe-agent", "claude-code", "oracle"]),
        ("model", ["of-mini-swe-agent", "of-claude-code"]),
    ],
)
def test_in_other_ways(database: Database, used: UUID, by: By, keys: list[str]) -> None:
    found = _rows(database, by)
    assert [row.key for row in found] == keys
    assert sum(row.calls for row in found) == 4
    if by == "model":
        assert {row.environment_s for row in found} == {None}
    else:
        assert sum(row.environment_s or 0 for row in found) == 180.0


def test_by_day_and_within_a_time(database: Database, used: UUID) -> None:
    [day] = _rows(database, "day")
    assert day.calls == 4
    assert day.environment_s == 180.0
    assert _rows(database, "day", until=ago(1000)) == []
    assert _rows(database, "user", user="bob") == []
    assert [row.calls for row in _rows(database, "run", since=ago(60))] == [4]


def _shown(database: Database, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    settings = Settings(_env_file=None, database_url=database.url)
    monkeypatch.setattr(command, "MegaFlow", lambda: MegaFlow(settings))
    cli = typer.Typer()
    command.register(cli)
    cli.callback()(lambda: None)
    return CliRunner().invoke(cli, ["usage", *arguments], catch_exceptions=False).output


def test_the_command_shows_unknown_as_unknown(database: Database, used: UUID, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = _shown(database, monkeypatch, "night").splitlines()
    assert any("cheap #0" in line and "$1.00" in line for line in lines)
    assert any("dear #0" in line and "unknown" in line for line in lines)
    assert any("plain #0" in line and "$" not in line and "unknown" not in line for line in lines)
    assert any("all" in line and "$1.00 + 2 unknown" in line for line in lines)


def test_the_command_as_json(database: Database, used: UUID, monkeypatch: pytest.MonkeyPatch) -> None:
    for by in get_args(By):
        found = json.loads(_shown(database, monkeypatch, "--by", by, "--json"))
        assert sum(row["calls"] for row in found) == 4
