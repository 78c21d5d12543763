"""Pauses and deadlines of runs and tasks against a real PostgreSQL."""

from __future__ import annotations

import getpass
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from sqlalchemy import text

from app.errors import UnknownName, WaitTimeout
from app.ledger import instances, pauses, tasks, users
from app.ledger.database import Database, Listener
from app.ledger.events import OUTCOME
from tests.building import RETRY
from tests.integration.command import CommandLine
from tests.integration.rows import a_run, a_task, ago, an_attempt, an_instance, facts, insert, one, paused


def place(database: Database, task_id: UUID) -> tuple[bool, ...]:
    """In line; due by now; put off for ever."""
    place = "in_line, available_at <= clock_timestamp() AS due, available_at > '9000-01-01' AS off"
    return tuple(one(database, f"SELECT {place} FROM tasks WHERE id = :id", id=task_id))


def test_a_paused_runs_tasks_leave_the_line_and_come_back(database: Database) -> None:
    run_id = a_run(database)
    waiting = a_task(database, run_id)
    delayed = a_task(database, run_id, in_line=False, available_at=ago(-3600))
    running = a_task(database, run_id, state="running")
    other = a_task(database, a_run(database, name="day"))

    with pytest.raises(UnknownName, match="is a task, expected a run; `megaflow show"):
        pauses.pause(database, str(running))
    change = pauses.pause(database, "night")

    assert (change.changed, change.waiting, change.run_id) == (True, 2, run_id)
    assert place(database, waiting) == (False, False, True)
    assert place(database, delayed) == (False, False, False), "its time has not come: the dispatcher parks it then"
    assert place(database, running) == (True, True, False)
    assert place(database, other) == (True, True, False)

    assert pauses.resume(database, "night").waiting == 2
    # Not in line yet: the dispatcher puts delayed tasks there whose time has come.
    assert place(database, waiting) == (False, True, False)
    assert place(database, delayed) == (False, False, False)


def test_people_pause_and_resume_by_name(database: Database, megaflow: CommandLine) -> None:
    run_id = a_run(database)
    a_task(database, run_id)
    said = megaflow("pause", "night", "--reason", "disk is full")
    assert said == f"run {run_id} paused; 1 task(s) wait; `megaflow resume night`\n"
    assert "was paused already" in megaflow("pause", "night")
    assert megaflow.json("resume", "night")["changed"] is True
    trail = list(reversed(users.actions(database, subjects=[str(run_id)])))
    assert [(one.action, one.reason) for one in trail[:2]] == [("run.paused", "disk is full"), ("run.paused", "")]
    assert trail[-1].action == "run.resumed"
    assert {one.user_name for one in trail} == {f"{getpass.getuser()} on {socket.gethostname()}"}
    assert "was not paused" in megaflow("resume", str(run_id)[-12:])
    assert paused(database) == []
    for verb in ("pause", "resume"):
        with pytest.raises(UnknownName, match="unknown run 'nightly'"):
            megaflow(verb, "nightly")


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


def test_people_drain_instances_by_name(database: Database, megaflow: CommandLine) -> None:
    one_of_two, other = (an_instance(database, mode="persistent", handle=str(pid)) for pid in (4711, 4712))
    an_instance(database, resource_class="gpu")
    assert "0 gone, 0 attempt(s) run on the rest" in megaflow("drain", "4711")
    states = {row.id: (row.state, row.draining_why) for row in instances.live(database, [one_of_two, other])}
    assert states == {one_of_two: ("draining", "drained by hand"), other: ("ready", None)}
    told = megaflow.json("drain", "4711", "4712")
    assert {row["id"]: row["state"] for row in told["live"]} == dict.fromkeys(map(str, states), "draining")
    with pytest.raises(WaitTimeout, match="2 instance"):
        megaflow("drain", one_of_two, str(other)[-12:], "--wait", "--timeout", "0")
    for instance_id in (one_of_two, other):
        assert instances.exited(database, instance_id, 0, "drained", RETRY)
    with pytest.raises(UnknownName, match="unknown live instance"):
        megaflow("drain", one_of_two)


def test_drain_waits_until_the_instances_are_gone(database: Database, megaflow: CommandLine) -> None:
    instance_id = an_instance(database, mode="persistent")
    leaver = threading.Timer(0.3, instances.exited, (database, instance_id, 0, "drained", RETRY))
    leaver.start()
    assert "1 gone" in megaflow("drain", instance_id, "--wait", "--timeout", "20")
    leaver.join()


def expire(database: Database) -> list[UUID]:
    with database.begin() as connection:
        return tasks.expire(connection, RETRY)


def in_an_hour() -> datetime:
    return datetime.now(UTC) + timedelta(hours=1)


def a_running_task(database: Database, **values: object) -> tuple[UUID, UUID]:
    """A task with a claimed attempt; their ids."""
    task_id = a_task(database, a_run(database), state="running", mode="persistent", attempts=1, **values)
    instance_id = an_instance(database, mode="persistent")
    attempt_id = an_attempt(database, task_id, mode="persistent", state="running", instance_id=instance_id)
    insert(database, "leases", attempt_id=attempt_id, instance_id=instance_id, expires_at=in_an_hour())
    return task_id, attempt_id


def task(database: Database, task_id: UUID) -> tuple[str | None, ...]:
    return tuple(one(database, "SELECT state, end_reason, cancel_reason FROM tasks WHERE id = :id", id=task_id))


def test_what_waits_past_its_deadline_ends_at_once_and_its_client_is_told(database: Database) -> None:
    run_id = a_run(database)
    late = a_task(database, run_id, deadline_at=ago(1))
    paused = a_task(database, run_id, deadline_at=ago(1), in_line=False, available_at="9999-01-01 00:00:00+00")
    in_time = a_task(database, run_id, deadline_at=in_an_hour())
    unbound = a_task(database, run_id)
    ear = Listener(database, OUTCOME)
    ear.wait(0)

    assert expire(database) == []

    assert task(database, late) == task(database, paused) == ("cancelled", "expired", "expired")
    assert task(database, in_time) == task(database, unbound) == ("pending", None, None)
    assert facts(database) == [("task.expired", {})] * 2
    assert ear.wait(5)
    ear.close()
    assert one(database, "SELECT finished_at IS NOT NULL AS ended FROM tasks WHERE id = :id", id=late).ended


def test_what_runs_is_told_once_and_goes_on_until_it_stops(database: Database) -> None:
    task_id, attempt_id = a_running_task(database, deadline_at=ago(1))
    assert expire(database) == [attempt_id]
    assert expire(database) == []
    assert task(database, task_id) == ("running", None, "expired")
    assert [kind for kind, _ in facts(database)] == ["task.expired"]


def test_a_worker_that_does_not_stop_when_told_loses_its_attempt(database: Database) -> None:
    told = {"cancel_requested_at": ago(tasks.GRACE_S + 5), "cancel_reason": "expired"}
    task_id, attempt_id = a_running_task(database, deadline_at=ago(100), **told)
    assert expire(database) == [attempt_id]
    assert task(database, task_id) == ("cancelled", "expired", "expired")
    assert one(database, "SELECT state FROM attempts WHERE id = :id", id=attempt_id).state == "lost"
    assert one(database, "SELECT count(*) AS n FROM leases").n == 0


def test_an_attempt_that_is_being_claimed_at_this_moment_is_told_and_not_waited_for(database: Database) -> None:
    task_id = a_task(database, a_run(database), state="admitted", attempts=1, deadline_at=ago(1))
    attempt_id = an_attempt(database, task_id)
    with database.begin() as claim, ThreadPoolExecutor(1) as threads:
        claim.execute(text("SELECT 1 FROM attempts WHERE id = :id FOR UPDATE"), {"id": attempt_id})
        assert threads.submit(expire, database).result(5) == []  # it waits for no lock
        running = "UPDATE attempts SET state = 'running', instance_id = :i WHERE id = :id"
        claim.execute(text(running), {"i": an_instance(database), "id": attempt_id})
        claim.execute(text("UPDATE tasks SET state = 'running' WHERE id = :id"), {"id": task_id})
    assert task(database, task_id) == ("running", None, "expired")


def test_two_sweepers_at_once_expire_a_task_once(database: Database) -> None:
    run_id = a_run(database)
    for _ in range(20):
        a_task(database, run_id, deadline_at=ago(1))
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(expire, [database] * 2))
    assert len(facts(database)) == 20
