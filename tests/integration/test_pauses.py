"""Pauses against a real PostgreSQL."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

import pytest

from app.errors import AmbiguousName, UnknownName, WaitTimeout
from app.ledger import instances, pauses
from app.ledger.database import Database, Listener
from app.ledger.events import WORK
from tests.building import RETRY
from tests.integration.command import CommandLine
from tests.integration.rows import a_run, a_task, ago, an_attempt, an_instance, facts, one
from tests.services import MakeSettings


def paused(database: Database) -> set[UUID]:
    return {one.run_id for one in pauses.all_of(database)}


def place(database: Database, task_id: UUID) -> tuple[bool, bool, bool]:
    """In line; due by now; put off for ever."""
    row = one(
        database,
        "SELECT in_line, available_at <= clock_timestamp() AS due, available_at > '9000-01-01' AS off FROM tasks"
        " WHERE id = :id",
        id=task_id,
    )
    return row.in_line, row.due, row.off


def test_what_is_paused_is_known_until_it_is_resumed(database: Database) -> None:
    run_id = a_run(database)
    pauses.pause(database, "night", "disk is full")
    assert paused(database) == {run_id}
    first = pauses.all_of(database)[0]
    assert (first.run_id, first.reason, first.waiting) == (run_id, "disk is full", 0)
    pauses.resume(database, str(run_id)[-12:])
    assert paused(database) == set()


def test_pausing_and_resuming_at_once_leaves_no_task_put_off(database: Database) -> None:
    """A second pause found the first one's row, and put tasks off after the resumption had taken that row away."""
    run_id = a_run(database)
    ids = [a_task(database, run_id) for _ in range(20)]
    for _ in range(40):
        verbs = [pauses.pause, pauses.pause, pauses.resume]
        with ThreadPoolExecutor(len(verbs)) as threads:
            for done in [threads.submit(verb, database, str(run_id)) for verb in verbs]:
                done.result()
        assert {place(database, one)[2] for one in ids} == {bool(paused(database))}


def test_a_paused_runs_tasks_leave_the_line_and_come_back(database: Database) -> None:
    run_id = a_run(database)
    waiting = a_task(database, run_id)
    delayed = a_task(database, run_id, in_line=False, available_at=ago(-3600))
    running = a_task(database, run_id, state="running")
    other = a_task(database, a_run(database, name="day"))

    change = pauses.pause(database, "night")

    assert (change.changed, change.waiting, change.run_id) == (True, 2, run_id)
    assert place(database, waiting) == (False, False, True)
    assert place(database, delayed) == (False, False, True)
    assert place(database, running) == (True, True, False)
    assert place(database, other) == (True, True, False)

    assert pauses.resume(database, "night").waiting == 2
    # Not in line yet: the dispatcher puts delayed tasks there whose time has come.
    assert place(database, waiting) == (False, True, False)
    assert place(database, delayed) == (False, True, False)


def test_resuming_leaves_alone_what_is_delayed_for_another_reason(database: Database) -> None:
    run_id = a_run(database)
    pauses.pause(database, "night")
    backed_off = a_task(database, run_id, in_line=False, available_at=ago(-3600))
    pauses.resume(database, "night")
    assert place(database, backed_off) == (False, False, False)


def test_a_second_pause_or_resumption_says_so_and_changes_nothing(database: Database) -> None:
    a_run(database)
    assert pauses.pause(database, "night", "first").changed
    since = pauses.all_of(database)[0].since
    assert not pauses.pause(database, "night", "second").changed
    assert [(row.since, row.reason) for row in pauses.all_of(database)] == [(since, "first")]
    assert pauses.resume(database, "night").changed
    assert not pauses.resume(database, "night").changed
    assert facts(database) == [
        ("run.paused", {"reason": "first"}),
        ("run.resumed", {}),
    ]


def test_a_second_pause_takes_along_what_came_into_line_meanwhile(database: Database) -> None:
    run_id = a_run(database)
    pauses.pause(database, "night")
    reopened = a_task(database, run_id)
    pauses.pause(database, "night")
    assert place(database, reopened) == (False, False, True)


def test_pausing_and_resuming_wake_the_dispatcher(database: Database) -> None:
    run_id = a_run(database)
    ear = Listener(database, WORK)
    ear.wait(0)
    pauses.pause(database, "night", "why not")
    assert ear.wait(5) == [""]
    pauses.resume(database, "night")
    assert ear.wait(5) == [""]
    ear.close()
    assert facts(database) == [("run.paused", {"reason": "why not"}), ("run.resumed", {})]
    assert one(database, "SELECT count(*) AS n FROM events WHERE run_id = :id", id=run_id).n == 2


def test_when_something_was_paused_stays_known(database: Database) -> None:
    run_id = a_run(database)
    pauses.pause(database, "night")
    pauses.resume(database, "night")
    pauses.pause(database, "night")
    row = one(
        database,
        "SELECT count(*) AS n, count(until) AS closed FROM bindings WHERE limit_name = :limit",
        limit=f"pause:run:{run_id}",
    )
    assert (row.n, row.closed) == (2, 1)


def test_a_name_that_nothing_has_is_refused(database: Database) -> None:
    a_run(database)
    for verb in (pauses.pause, pauses.resume):
        with pytest.raises(UnknownName, match="unknown run 'nightly'"):
            verb(database, "nightly")
    assert paused(database) == set()
    assert facts(database) == []


# --- The command line -----------------------------------------------------------------------------------------------


@pytest.fixture
def megaflow(make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    return CommandLine(make_settings(), monkeypatch)


def test_people_pause_and_resume_by_name(database: Database, megaflow: CommandLine) -> None:
    run_id = a_run(database)
    a_task(database, run_id)
    assert megaflow("pauses") == "nothing is paused\n"
    said = megaflow("pause", "night", "--reason", "disk is full")
    assert said == f"run {run_id} paused; 1 task(s) wait; `megaflow resume night`\n"
    assert "was paused already" in megaflow("pause", "night")
    assert "disk is full" in megaflow("pauses")
    (row,) = megaflow.json("pauses")
    assert (row["run_id"], row["waiting"], row["reason"]) == (str(run_id), 1, "disk is full")
    assert megaflow.json("resume", "night")["changed"] is True
    assert "was not paused" in megaflow("resume", "night")
    with pytest.raises(UnknownName):
        megaflow("pause", "nobody")


def test_people_see_the_live_instances(database: Database, megaflow: CommandLine) -> None:
    assert megaflow("instances") == "no live instances\n"
    instance_id = an_instance(database, mode="persistent", slots=4, handle="4711", draining_why="too old")
    an_instance(database, state="terminated")
    task_id = a_task(database, a_run(database), state="running")
    an_attempt(database, task_id, mode="persistent", state="running", instance_id=instance_id)
    (row,) = megaflow.json("instances")
    assert (row["id"], row["mode"], row["resource_class"]) == (str(instance_id), "persistent", "standard")
    assert (row["used"], row["slots"], row["draining_why"], row["silent_s"]) == (1, 4, "too old", None)
    printed = megaflow("instances")
    for part in (str(instance_id)[-12:], "1 of 4", "process 4711", "too old", "ready"):
        assert part in printed


def test_people_drain_instances_by_name_or_by_class(database: Database, megaflow: CommandLine) -> None:
    one_of_two, other = (an_instance(database, mode="persistent", handle=str(pid)) for pid in (4711, 4712))
    an_instance(database, resource_class="gpu")
    assert "0 gone, 0 attempt(s) run on the rest" in megaflow("drain", "4711", "--why", "too old")
    states = {row.id: (row.state, row.draining_why) for row in instances.live(database, [one_of_two, other])}
    assert states == {one_of_two: ("draining", "too old"), other: ("ready", None)}
    told = megaflow.json("drain", "--class", "standard")
    assert {row["id"]: row["state"] for row in told["live"]} == {
        str(one_of_two): "draining",
        str(other): "draining",
    }
    with pytest.raises(WaitTimeout, match="2 instance"):
        megaflow("drain", one_of_two, str(other)[-12:], "--wait", "--timeout", "0")
    for instance_id in (one_of_two, other):
        assert instances.exited(database, instance_id, 0, "drained", RETRY)
    with pytest.raises(UnknownName, match="unknown live instance"):
        megaflow("drain", one_of_two)
    assert megaflow.json("drain", "--class", "standard", "--wait") == {"asked": [], "gone": 0, "live": []}


def test_drain_waits_until_the_instances_are_gone(database: Database, megaflow: CommandLine) -> None:
    instance_id = an_instance(database, mode="persistent")
    leaver = threading.Timer(0.3, instances.exited, (database, instance_id, 0, "drained", RETRY))
    leaver.start()
    assert "1 gone" in megaflow("drain", instance_id, "--wait", "--timeout", "20")
    leaver.join()


def test_what_is_drained_must_be_said_exactly(database: Database, megaflow: CommandLine) -> None:
    for _ in range(2):
        an_instance(database, mode="persistent", handle="4711")
    with pytest.raises(AmbiguousName):
        megaflow("drain", "4711")
    with pytest.raises(UnknownName, match="unknown resource class 'gpu'; known: standard"):
        megaflow("drain", "--class", "gpu")
    with pytest.raises(SystemExit):
        megaflow("drain")
    assert {row.state for row in instances.live(database)} == {"ready"}
