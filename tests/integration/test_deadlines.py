"""Deadlines of runs and tasks against a real PostgreSQL."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from sqlalchemy import text

from app.cli.control import moment
from app.errors import SpecInvalid, UnknownName
from app.ledger import deadlines
from app.ledger.database import Database, Listener
from app.ledger.events import OUTCOME
from tests.building import RETRY
from tests.integration.command import CommandLine
from tests.integration.rows import a_run, a_task, ago, an_attempt, an_instance, facts, insert, one
from tests.services import MakeSettings


def expire(database: Database) -> list[UUID]:
    with database.begin() as connection:
        return deadlines.expire(connection, RETRY)


def in_an_hour() -> datetime:
    return datetime.now(UTC) + timedelta(hours=1)


def a_running_task(database: Database, **values: object) -> tuple[UUID, UUID]:
    """A task with a claimed attempt; their ids."""
    task_id = a_task(database, a_run(database), state="running", mode="persistent", attempts=1, **values)
    instance_id = an_instance(database, mode="persistent")
    attempt_id = an_attempt(database, task_id, mode="persistent", state="running", instance_id=instance_id)
    insert(database, "leases", attempt_id=attempt_id, instance_id=instance_id, expires_at=in_an_hour())
    return task_id, attempt_id


def task(database: Database, task_id: UUID) -> tuple[str, str | None, str | None]:
    row = one(database, "SELECT state, end_reason, cancel_reason FROM tasks WHERE id = :id", id=task_id)
    return row.state, row.end_reason, row.cancel_reason


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
    assert facts(database) == [("task.expired", {"was": "pending"})] * 2
    assert ear.wait(5)
    ear.close()
    assert one(database, "SELECT finished_at IS NOT NULL AS ended FROM tasks WHERE id = :id", id=late).ended


def test_an_admitted_task_ends_with_its_attempt(database: Database) -> None:
    task_id = a_task(database, a_run(database), state="admitted", attempts=1, deadline_at=ago(1))
    attempt_id = an_attempt(database, task_id)
    assert expire(database) == []
    assert task(database, task_id) == ("cancelled", "expired", "expired")
    attempt = one(database, "SELECT state, end_reason, finished_at FROM attempts WHERE id = :id", id=attempt_id)
    assert (attempt.state, attempt.end_reason) == ("cancelled", "expired")
    assert attempt.finished_at is not None


def test_what_runs_is_told_once_and_goes_on_until_it_stops(database: Database) -> None:
    task_id, attempt_id = a_running_task(database, deadline_at=ago(1))
    assert expire(database) == [attempt_id]
    assert task(database, task_id) == ("running", None, "expired")
    assert expire(database) == []
    assert [kind for kind, _ in facts(database)] == ["task.expired"]


def test_a_worker_that_does_not_stop_when_told_loses_its_attempt(database: Database) -> None:
    told = ago(deadlines.GRACE_S + 5)
    task_id, attempt_id = a_running_task(
        database, deadline_at=ago(100), cancel_requested_at=told, cancel_reason="expired"
    )
    assert expire(database) == [attempt_id]
    assert task(database, task_id) == ("cancelled", "expired", "expired")
    assert one(database, "SELECT state FROM attempts WHERE id = :id", id=attempt_id).state == "lost"
    assert one(database, "SELECT count(*) AS n FROM leases").n == 0


def test_a_worker_that_is_still_within_its_grace_keeps_its_attempt(database: Database) -> None:
    a_running_task(database, deadline_at=ago(100), cancel_requested_at=datetime.now(UTC), cancel_reason="expired")
    assert expire(database) == []
    assert one(database, "SELECT state FROM attempts").state == "running"


def test_an_attempt_that_is_being_claimed_at_this_moment_is_looked_at_the_next_time(database: Database) -> None:
    task_id = a_task(database, a_run(database), state="admitted", attempts=1, deadline_at=ago(1))
    attempt_id = an_attempt(database, task_id)
    with database.begin() as claim:
        claim.execute(text("SELECT 1 FROM attempts WHERE id = :id FOR UPDATE"), {"id": attempt_id})
        done = threading.Event()

        def look() -> None:
            assert expire(database) == []
            done.set()

        looker = threading.Thread(target=look)
        looker.start()
        assert done.wait(5)  # it waits for no lock
        looker.join()
        instance_id = an_instance(database)
        claim.execute(
            text("UPDATE attempts SET state = 'running', instance_id = :i WHERE id = :id"),
            {"i": instance_id, "id": attempt_id},
        )
        claim.execute(text("UPDATE tasks SET state = 'running' WHERE id = :id"), {"id": task_id})
    assert task(database, task_id) == ("running", None, None)
    assert expire(database) == [attempt_id]


def test_two_sweepers_at_once_expire_a_task_once(database: Database) -> None:
    run_id = a_run(database)
    for _ in range(20):
        a_task(database, run_id, deadline_at=ago(1))
    threads = [threading.Thread(target=expire, args=(database,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(facts(database)) == 20


# --- Setting one ----------------------------------------------------------------------------------------------------


def deadline_of(database: Database, task_id: UUID) -> datetime | None:
    found: datetime | None = one(database, "SELECT deadline_at FROM tasks WHERE id = :id", id=task_id).deadline_at
    return found


def test_a_runs_deadline_reaches_its_tasks_that_have_not_ended(database: Database) -> None:
    run_id = a_run(database)
    waiting, ended = a_task(database, run_id), a_task(database, run_id, state="succeeded")
    at = in_an_hour()

    done = deadlines.set_deadline(database, "night", at)

    assert (done.run_id, done.tasks) == (run_id, 1)
    assert one(database, "SELECT deadline_at FROM runs").deadline_at == at
    assert (deadline_of(database, waiting), deadline_of(database, ended)) == (at, None)
    assert facts(database) == [("run.deadline_set", {"at": at.isoformat(), "tasks": 1})]

    later = at + timedelta(hours=5)
    deadlines.set_deadline(database, "night", later)
    assert deadline_of(database, waiting) == later
    deadlines.set_deadline(database, "night", None)
    assert deadline_of(database, waiting) is None


@pytest.mark.parametrize("at", [ago(1), datetime(1970, 1, 1, tzinfo=UTC)])
def test_a_deadline_in_the_past_changes_nothing(database: Database, at: datetime) -> None:
    task_id = a_task(database, a_run(database))
    with pytest.raises(SpecInvalid, match=r"in the future.*nothing was changed"):
        deadlines.set_deadline(database, "night", at)
    assert deadline_of(database, task_id) is None
    assert facts(database) == []


def test_a_time_without_a_zone_is_refused(database: Database) -> None:
    a_task(database, a_run(database))
    with pytest.raises(SpecInvalid, match="with its zone"):
        deadlines.set_deadline(database, "night", datetime(2199, 1, 1))


def test_what_has_ended_gets_no_deadline(database: Database) -> None:
    run_id = a_run(database)
    a_task(database, run_id, state="succeeded")
    with pytest.raises(SpecInvalid, match="that has not ended"):
        deadlines.set_deadline(database, "night", in_an_hour())
    assert one(database, "SELECT deadline_at FROM runs").deadline_at is None
    with pytest.raises(UnknownName):
        deadlines.set_deadline(database, "0123", in_an_hour())


# --- The command line -----------------------------------------------------------------------------------------------

NOON = datetime(2030, 6, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("2h", NOON + timedelta(hours=2)),
        ("1d12h", NOON + timedelta(hours=36)),
        ("90m", NOON + timedelta(minutes=90)),
        ("1h30m5s", NOON + timedelta(seconds=5405)),
        ("2031-05-01T08:00Z", datetime(2031, 5, 1, 8, tzinfo=UTC)),
        ("2031-05-01T08:00+02:00", datetime(2031, 5, 1, 6, tzinfo=UTC)),
        ("never", None),
    ],
)
def test_a_moment_is_said_as_a_duration_or_a_time(said: str, meant: datetime | None) -> None:
    assert moment(said, NOON) == meant


@pytest.mark.parametrize("said", ["", "soon", "2", "2h5", "-2h", "h", "2031-13-01", "9999999999d"])
def test_a_moment_that_cannot_be_read_is_refused(said: str) -> None:
    with pytest.raises(SpecInvalid, match="expected a duration such as 2h"):
        moment(said, NOON)


def test_people_set_a_deadline(
    database: Database, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    megaflow = CommandLine(make_settings(), monkeypatch)
    run_id = a_run(database)
    task_id = a_task(database, run_id)
    assert "1 task(s) concerned" in megaflow("deadline", "night", "2h")
    found = deadline_of(database, task_id)
    assert found is not None
    assert abs((found - datetime.now(UTC)).total_seconds() - 7200) < 60
    assert megaflow.json("deadline", "night", "never")["at"] is None
    with pytest.raises(SpecInvalid, match="in the future"):
        megaflow("deadline", "night", "2001-01-01T00:00Z")
    with pytest.raises(SpecInvalid, match="in the future"):
        megaflow("deadline", "night", "0s")
