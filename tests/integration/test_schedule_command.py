"""`megaflow schedule add` against a real PostgreSQL: what it keeps is what a firing submits."""

from __future__ import annotations

import getpass
import socket
from datetime import UTC, datetime

import pytest

from app.control.calendar import Calendar
from app.datasets.selection import Selection
from app.errors import SpecInvalid
from app.evaluation import Submission
from app.ledger import results, schedules, users
from app.ledger.database import Database
from app.models.overrides import EnvironmentOverrides, LimitOverrides
from app.models.spec import ModelChoice, Network, Reuse, Sampling
from app.settings import Settings
from tests.integration.command import CommandLine
from tests.integration.rows import one, write


def kept(database: Database) -> Submission:
    (row,) = schedules.all_of(database)
    return Submission.model_validate({**row.submission, "dataset": row.dataset})


def test_every_option_is_kept_as_a_submission_would_have_it(megaflow: CommandLine, database: Database) -> None:
    megaflow(
        *("schedule", "add", "nightly", "0 3 * * *", "demo", "--agent", "nop,oracle", "--replicas", 2, "--limit", 3),
        *("-n", 4),
        *("--model", "m", "--base-url", "http://127.0.0.1:9/v1", "--side-model", "s", "--no-check"),
        *("--task", "csv-to-jsonl"),
        *("--temperature", 0.2, "--top-p", 0.9, "--max-tokens", 512, "--seed", 7),
        *("--network", "allowlist", "--allow-host", "a.example.org", "--reuse", "fresh", "--setup", "true"),
        *("--disk", 512, "--user", "alice", "--priority", 7, "--deadline", 3600, "--budget", 2.5),
        *("--max-steps", 9, "--agent-timeout", 60, "--command-timeout", 5, "--turn-tokens", 1000),
        *("--context-tokens", 9000, "--task-budget", 0.5, "--max-attempts", 2),
    )
    assert kept(database) == Submission(
        dataset="demo",
        agent="nop,oracle",
        replicas=2,
        max_running=4,
        model=ModelChoice(
            name="m",
            base_url="http://127.0.0.1:9/v1",
            side_models=("s",),
            sampling=Sampling(temperature=0.2, top_p=0.9, max_tokens=512, seed=7),
        ),
        selection=Selection(only=("csv-to-jsonl",), limit=3),
        name="nightly",
        user_name="alice",
        priority=7,
        deadline_s=3600,
        budget_usd=2.5,
        overrides=EnvironmentOverrides(
            network=Network.ALLOWLIST,
            allowed_hosts=("a.example.org",),
            reuse=Reuse.FRESH,
            setup=("true",),
            disk_bytes=512 << 20,
        ),
        limits=LimitOverrides(
            max_steps=9,
            agent_timeout_s=60,
            command_timeout_s=5,
            max_turn_tokens=1000,
            context_tokens=9000,
            budget_usd=0.5,
            max_attempts=2,
        ),
    )


def test_who_added_and_removed_a_schedule_is_kept_with_the_reason(megaflow: CommandLine, database: Database) -> None:
    megaflow("schedule", "add", "daily", "0 3 * * *", "demo", "--agent", "nop", "--reason", "a new agent")
    megaflow("schedule", "remove", "daily", "--reason", "too dear")
    trail = [(one.action, one.subject, one.reason) for one in users.actions(database)]
    assert trail == [("schedule.removed", "daily", "too dear"), ("schedule.added", "daily", "a new agent")]
    assert {one.user_name for one in users.actions(database)} == {f"{getpass.getuser()} on {socket.gethostname()}"}


def test_a_firing_submits_with_what_was_asked(megaflow: CommandLine, database: Database, settings: Settings) -> None:
    asked = ("--agent", "nop", "--limit", 1, "--user", "bob", "--priority", 5, "--network", "open", "--deadline", 60)
    megaflow("schedule", "add", "often", "* * * * *", "demo", *asked)
    write(database, "UPDATE schedules SET settled_until = clock_timestamp() - interval '90 s'")
    assert Calendar(settings, database).tick(datetime.now(UTC).replace(second=2, microsecond=0)) == 1
    (run,) = results.runs(database)
    assert (run.user_name, run.total) == ("bob", 1)
    task = one(database, "SELECT priority, deadline_at > clock_timestamp() AS later, id FROM tasks")
    assert (task.priority, task.later) == (5, True)
    assert results.task_spec(database, task.id).task.environment.network is Network.OPEN


def test_a_submission_and_its_status_say_how_many_tasks_have_an_open_network(megaflow: CommandLine) -> None:
    asked = ("demo", "--agent", "nop", "--limit", 2)
    said = " ".join(megaflow("submit", *asked, "--network", "open", "--name", "opened").split())
    assert "2 of 2 tasks have an open network" in said
    assert "2 of 2 tasks have an open network" in " ".join(megaflow("status", "opened").split())
    assert megaflow.json("status", "opened")["runs"][0]["open_networks"] == 2
    assert "open network" not in megaflow("submit", *asked, "--name", "closed")
    assert megaflow.json("status", "closed")["runs"][0]["open_networks"] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--class", "huge"), ("resource class", "'huge'", "megaflow classes set huge")),
        (("--task", "nobody"), ("no task 'nobody'",)),
        (("--agent-arg", "colour=blue"), ("'nop' takes no arguments",)),
        (("--agent-arg", "colour"), ("expected KEY=VALUE", "'colour'")),
        (("--seed", 7), ("--model beside --seed", "found none")),
        (("--base-url", "http://127.0.0.1:9/v1"), ("--model beside --base-url", "found none")),
        (("--network", "none", "--allow-host", "a.example.org"), ("allowed_hosts",)),
    ],
)
def test_what_no_firing_could_submit_is_refused_at_once(
    megaflow: CommandLine, database: Database, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    with pytest.raises(SpecInvalid) as refused:
        megaflow("schedule", "add", "never", "0 3 * * *", "demo", "--agent", "nop", *options)
    for word in words:
        assert word in str(refused.value)
    assert schedules.all_of(database) == []
