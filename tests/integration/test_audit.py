"""The auditor against a real PostgreSQL, broken on purpose: it sees each fault, repairs it, and is quiet again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from app.ledger import audit, pauses
from app.ledger.audit import AuditFinding, AuditResult
from app.ledger.audit_checks import CHECKS
from app.ledger.database import Database, Leadership
from app.models.tables import PAUSED
from app.scheduling.auditor import AUDITOR, Auditor
from app.settings import Settings
from tests.building import RETRY, new_id
from tests.integration.command import CommandLine
from tests.integration.rows import a_run, a_task, ago, an_attempt, an_instance, every, facts, force, insert, one
from tests.services import MakeSettings
from tests.waiting import eventually, in_background


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings(ephemeral_capacity=2, persistent_instances=1, retry_base_s=0.0, audit_s=0.2)


def look(database: Database, settings: Settings, seen: AuditResult | None = None) -> AuditResult:
    return audit.look(database, settings, seen.memory if seen else None)


def found(database: Database, settings: Settings) -> dict[str, AuditFinding]:
    return {finding.name: finding for finding in look(database, settings).findings}


def pending(database: Database, **values: object) -> UUID:
    return a_task(database, a_run(database, name=str(new_id())), **values)  # type: ignore[arg-type]


def admitted(database: Database, mode: str = "ephemeral", **values: object) -> tuple[UUID, UUID]:
    """A task and its dispatched attempt."""
    task_id = pending(database, mode=mode, state="admitted", attempts=1)
    return task_id, an_attempt(database, task_id, mode=mode, **values)


def pool(database: Database, slots: int = 4, **values: object) -> UUID:
    return an_instance(
        database, mode="persistent", **{"slots": slots, "ready_at": ago(50), "seen_at": ago(1), **values}
    )


def running(database: Database, instance_id: UUID | None = None, **values: object) -> tuple[UUID, UUID, UUID]:
    """A task, its running attempt with a lease, and the standing instance that it is on."""
    instance_id = instance_id or pool(database)
    task_id = pending(database, mode="persistent", state="running", attempts=1)
    attempt_id = an_attempt(
        database, task_id, mode="persistent", **{"state": "running", "instance_id": instance_id, **values}
    )
    lease(database, attempt_id, instance_id)
    return task_id, attempt_id, instance_id


def lease(database: Database, attempt_id: UUID, instance_id: UUID, left_s: float = 3600.0) -> None:
    insert(database, "leases", attempt_id=attempt_id, instance_id=instance_id, expires_at=ago(-left_s))


def empty(database: Database) -> None:
    """Delete all rows but the migrations' own."""
    own = "('alembic_version', 'legal_moves', 'resource_classes')"
    tables = every(database, f"SELECT relname FROM pg_stat_user_tables WHERE relname NOT IN {own}")
    force(database, ";".join(f"DELETE FROM {table.relname}" for table in tables))


def in_order(database: Database) -> None:
    """One of everything that is as it should be, at every age that it may have."""
    admitted(database)
    _, attempt_id, instance_id = running(database)
    in_grading(database)
    grader = an_instance(database, mode="grading")
    lease(database, in_grading(database, grader=grader), grader)
    pending(database, mode="ephemeral", accepted_at=ago(5000))
    pending(database, in_line=False, available_at=ago(-500))
    paused = a_run(database)
    a_task(database, paused, in_line=False, available_at=PAUSED)
    insert(database, "pauses", kind="run", name=str(paused))
    ended = pending(database, state="succeeded", attempts=2, finished_at=ago(3))
    an_attempt(database, ended, number=1, state="lost", instance_id=instance_id, finished_at=ago(9))
    an_attempt(database, ended, number=2, state="finished", instance_id=instance_id, finished_at=ago(3))
    an_instance(database, state="booting", requested_at=ago(2))
    an_instance(database, state="failed", requested_at=ago(900), ended_at=ago(800), swept_at=ago(790))
    leaving = an_attempt(
        database, pending(database, state="failed", attempts=1, finished_at=ago(5)), state="error", finished_at=ago(5)
    )
    an_instance(database, state="busy", attempt_id=leaving, ready_at=ago(60))
    a_hold(database, attempt_id, instance_id=instance_id, expires_at=ago(-30))


def test_a_ledger_in_order_has_no_findings(database: Database, settings: Settings) -> None:
    assert look(database, settings).findings == ()
    in_order(database)
    seen = look(database, settings)
    assert seen.findings == ()
    assert seen.lines["ephemeral.standard"][0] == 1
    assert seen.lines["ephemeral.standard"][1] > 4000
    assert seen.ages["oldest_unclaimed_s"] is not None
    assert seen.ages["oldest_unleased_s"] is None


Break = Callable[[Database], object]


def then(make: Callable[[Database], tuple[UUID, ...]], *statements: str) -> Break:
    """What is made, and then a change of it: `:task`, `:attempt` and `:instance` are what was made."""

    def fault(database: Database) -> None:
        made = dict(zip(("task", "attempt", "instance"), make(database), strict=False))
        for statement in statements:
            force(database, statement, **{name: one for name, one in made.items() if f":{name}" in statement})

    return fault


def no_lease(database: Database) -> None:
    running(database)
    force(database, "DELETE FROM leases")


def more_than_the_pool_had(database: Database) -> None:
    instance_id = pool(database, slots=1)
    running(database, instance_id, dispatched_at=ago(5))
    admitted(database, "persistent", dispatched_at=ago(4))


def more_than_an_instance_has(database: Database) -> None:
    pool(database, slots=4)
    instance_id = pool(database, slots=1)
    for _ in range(2):
        running(database, instance_id)


def an_instance_used_twice(database: Database) -> None:
    instance_id = an_instance(database, state="busy", ready_at=ago(9))
    for n in range(2):
        task_id = pending(database, state="failed", attempts=1, finished_at=ago(n))
        an_attempt(database, task_id, state="error", instance_id=instance_id, finished_at=ago(n))


def an_instance_that_stayed(database: Database) -> None:
    task_id = pending(database, state="failed", attempts=1, finished_at=ago(600))
    attempt_id = an_attempt(database, task_id, state="error", finished_at=ago(600))
    an_instance(database, state="busy", attempt_id=attempt_id, ready_at=ago(700), requested_at=ago(701))


def left_behind(database: Database, **values: object) -> None:
    ended = an_instance(database, state="failed", requested_at=ago(900), ended_at=ago(800), **values)
    owner = {name: new_id() for name in ("run_id", "task_id", "attempt_id")}
    insert(database, "created_resources", engine_id="c1", kind="container", instance_id=ended, **owner)


def a_wait_that_was_jumped(database: Database) -> None:
    later = a_wait_for(database, "pending")
    force(database, "UPDATE tasks SET waits = false, state = 'admitted', attempts = 1 WHERE id = :id", id=later)
    an_attempt(database, later)


def a_wait_for(database: Database, state: str) -> UUID:
    """A task in this state, which has no mark."""
    ended = {} if state == "pending" else {"finished_at": ago(600), "in_line": False}
    upstream = pending(database, state=state, **ended)
    later = pending(database, in_line=False, waits=True, accepted_at=ago(900))
    run_id = one(database, "SELECT run_id FROM tasks WHERE id = :id", id=later).run_id
    insert(database, "task_dependencies", run_id=run_id, on_task=upstream)
    return later


def faults_used_up(database: Database) -> None:
    pending(database, faults=3)


def a_hold_of_a_dead_attempt(database: Database) -> None:
    instance_id = pool(database)
    task_id = pending(database, state="failed", attempts=1, finished_at=ago(600))
    attempt_id = an_attempt(database, task_id, state="error", instance_id=instance_id, finished_at=ago(600))
    a_hold(database, attempt_id, limit="image_pulls:a b", expires_at=ago(600))


def more_held_than_there_is(database: Database) -> None:
    insert(database, "limits", name="environment_starts:here", capacity=1)
    _, attempt_id, _ = running(database)
    for _ in range(2):
        a_hold(database, attempt_id, expires_at=ago(-60))


def a_hold(database: Database, attempt_id: UUID, *, limit: str = "environment_starts:here", **values: object) -> None:
    row = {"limit_name": limit, "holder": new_id(), "attempt_id": attempt_id, "granted_at": ago(1)}
    insert(database, "semaphore_holders", **(row | values))


def too_many(count: int, **quota: int) -> Break:
    """Live attempts of one user."""

    def fault(database: Database) -> None:
        if quota:
            insert(database, "quotas", user_name="*", **quota)
        for _ in range(count):
            admitted(database)

    return fault


def in_grading(database: Database, *, grader: UUID | None = None, **values: object) -> UUID:
    """An attempt whose agent has ended, with its row in `gradings`; one that a grader has, has no lease yet."""
    task_id = pending(database, mode="persistent", state="running", attempts=1)
    attempt_id = an_attempt(
        database, task_id, mode="persistent", state="grading", gradings=1, instance_id=pool(database)
    )
    row = {"number": 1, "resource_class": "standard", "submission": {"end_reason": "submitted"}, "instance_id": grader}
    insert(database, "gradings", attempt_id=attempt_id, **(row | values))
    return attempt_id


def a_grading_of_a_dead_grader(database: Database) -> None:
    grader = an_instance(database, mode="grading", state="failed", ended_at=ago(3), swept_at=ago(2))
    lease(database, in_grading(database, grader=grader), grader)


def a_group(database: Database, state: str, /, **task: Any) -> UUID:
    """Of a training run, with one task that ended long ago."""
    run_id = a_run(database)
    insert(database, "experience_runs", run_id=run_id, policy="policy")
    task_id = a_task(database, run_id, finished_at=ago(600), in_line=False, **task)
    insert(database, "experience_groups", group_id=task_id, run_id=run_id, state=state)
    return task_id


_OVER = "finished_at = clock_timestamp()"
_SUPERSEDED = {"end_reason": "superseded", "verdict": {"reward": 1.0, "counts": True}}

MENDED: list[tuple[str, Break]] = [
    ("attempt.not_current", then(running, f"UPDATE tasks SET state = 'failed', {_OVER} WHERE id = :task")),
    ("attempt.not_current", then(admitted, "UPDATE tasks SET state = 'pending' WHERE id = :task")),
    ("attempt.out_of_step", then(running, "UPDATE tasks SET state = 'admitted' WHERE id = :task")),
    ("task.without_attempt", then(admitted, f"UPDATE attempts SET state = 'lost', {_OVER} WHERE id = :attempt")),
    ("task.without_attempt", then(admitted, "UPDATE tasks SET state = 'running' WHERE id = :task")),
    ("task.number_behind", lambda db: an_attempt(db, pending(db), number=3, state="lost", finished_at=ago(1))),
    ("attempt.without_lease", no_lease),
    ("lease.orphan", lambda db: lease(db, admitted(db)[1], pool(db))),
    (
        "attempt.on_dead_instance",
        then(running, "UPDATE instances SET state = 'failed', ended_at = clock_timestamp() WHERE id = :instance"),
    ),
    ("lease.lapsed", then(running, "UPDATE leases SET expires_at = clock_timestamp() - interval '5 min'")),
    ("attempt.grading_nowhere", lambda db: force(db, "DELETE FROM gradings WHERE attempt_id = :id", id=in_grading(db))),
    (
        "grading.orphan",
        then(
            lambda db: (new_id(), in_grading(db)),
            f"UPDATE tasks SET state = 'failed', {_OVER} WHERE id = (SELECT task_id FROM attempts WHERE id = :attempt)",
            f"UPDATE attempts SET state = 'error', {_OVER} WHERE id = :attempt",
        ),
    ),
    ("grading.abandoned", lambda db: in_grading(db, grader=an_instance(db, mode="grading"))),
    ("grading.abandoned", a_grading_of_a_dead_grader),
    ("instance.never_ready", lambda db: an_instance(db, state="requested", requested_at=ago(600))),
    ("instance.overstays", an_instance_that_stayed),
    ("instance.stray", lambda db: an_instance(db, ready_at=ago(600), requested_at=ago(601))),
    ("instance.overdue", lambda db: pool(db, deadline_at=ago(600))),
    ("task.delay_over", lambda db: pending(db, in_line=False, available_at=ago(600))),
    ("task.delay_over", lambda db: pending(db, in_line=False, available_at=PAUSED)),
    ("task.waits_for_nothing", lambda db: pending(db, in_line=False, waits=True, accepted_at=ago(600))),
    ("task.waits_for_nothing", lambda db: a_wait_for(db, "succeeded")),
    ("task.waits_for_nothing", lambda db: a_wait_for(db, "failed")),
    ("task.cancelled_yet_waiting", lambda db: pending(db, cancel_requested_at=ago(600))),
    ("hold.orphan", a_hold_of_a_dead_attempt),
]
REPORTED: list[tuple[str, Break]] = [
    (
        "task.finished_not_ended",
        then(running, f"UPDATE attempts SET state = 'finished', {_OVER} WHERE id = :attempt", "DELETE FROM leases"),
    ),
    ("task.number_ahead", lambda db: pending(db, attempts=4)),
    ("slots.pool_over", more_than_the_pool_had),
    ("instance.over_slots", more_than_an_instance_has),
    ("instance.used_twice", an_instance_used_twice),
    ("instance.without_pool", lambda db: pool(db, resource_class="gone")),
    ("engine_object.left_behind", lambda db: left_behind(db, swept_at=ago(790))),
    ("engine_object.left_behind", left_behind),
    ("task.begun_too_early", a_wait_that_was_jumped),
    (
        "task.ignores_cancel",
        then(running, "UPDATE tasks SET cancel_requested_at = now() - interval '10 min' WHERE id = :task"),
    ),
    ("task.expired_yet_waiting", lambda db: pending(db, deadline_at=ago(600))),
    ("task.tries_used_up", faults_used_up),
    ("grading.unclaimed", lambda db: in_grading(db, available_at=ago(600))),
    ("attempt.unclaimed", lambda db: admitted(db, dispatched_at=ago(600))),
    ("slots.over_capacity", too_many(3)),
    ("hold.over_capacity", more_held_than_there_is),
    ("running.over_capacity", too_many(2, running=1)),
    ("instances.over_capacity", too_many(2, instances=1)),
    ("line.without_capacity", lambda db: pending(db, resource_class="gone")),
    (
        "task.superseded_with_verdict",
        lambda db: a_task(db, a_run(db), state="cancelled", finished_at=ago(1), **_SUPERSEDED),
    ),
    ("group.not_closed", lambda db: a_group(db, "open", state="cancelled", end_reason="cancelled")),
    ("group.ready_without_samples", lambda db: a_group(db, "ready", state="cancelled", end_reason="cancelled")),
]


def test_every_check_has_a_fault_that_it_sees() -> None:
    assert {check.name for check in CHECKS} - {"transaction.old"} <= {name for name, _ in (*MENDED, *REPORTED)}


def test_a_fault_is_seen_and_mended_and_clear(database: Database, settings: Settings) -> None:
    for name, fault in MENDED:
        assert found(database, settings) == {}
        fault(database)
        seen = found(database, settings)[name]
        assert (seen.count, len(seen.ids)) == (1, 1), name
        auditor = Auditor(database, settings)
        assert sum(finding.repaired or 0 for finding in auditor.audit().findings) >= 1, name
        assert found(database, settings) == {}, name
        assert auditor.audit().findings == (), name
        empty(database)


def test_a_fault_that_needs_a_person_is_reported_and_left_alone(database: Database, settings: Settings) -> None:
    for name, fault in REPORTED:
        fault(database)
        assert set(found(database, settings)) == {name}
        (finding,) = Auditor(database, settings).audit().findings
        assert not finding.repaired, name
        assert set(found(database, settings)) == {name}
        empty(database)


@pytest.mark.parametrize(
    ("ended", "comes_to"), [("succeeded", "pending"), ("failed", "cancelled"), ("cancelled", "cancelled")]
)
def test_a_task_found_waiting_for_what_has_ended_goes_its_way(
    database: Database, settings: Settings, ended: str, comes_to: str
) -> None:
    later = a_wait_for(database, ended)
    Auditor(database, settings).audit()
    task = one(database, "SELECT state, waits FROM tasks WHERE id = :id", id=later)
    assert task.state == comes_to
    assert not (task.waits and comes_to == "pending")


def test_an_admitted_task_without_an_attempt_is_in_line_again_and_no_try_is_used_up(
    database: Database, settings: Settings
) -> None:
    task_id, attempt_id = admitted(database)
    force(database, "DELETE FROM attempts WHERE id = :id", id=attempt_id)
    force(database, "UPDATE tasks SET attempts = 0 WHERE id = :id", id=task_id)
    Auditor(database, settings).audit()
    found_ = one(database, "SELECT state, in_line, faults FROM tasks WHERE id = :id", id=task_id)
    assert found_ == ("pending", True, 0)
    assert ("task.repaired", {"by": "auditor", "finding": "task.without_attempt"}) in facts(database)


def test_a_task_of_a_paused_run_goes_back_to_its_pause(database: Database, settings: Settings) -> None:
    task_id, attempt_id = admitted(database)
    run_id = one(database, "SELECT run_id FROM tasks").run_id
    pauses.pause(database, str(run_id))
    force(database, "UPDATE attempts SET state = 'lost', finished_at = clock_timestamp() WHERE id = :id", id=attempt_id)
    auditor = Auditor(database, settings)
    auditor.audit()
    assert one(database, "SELECT state, in_line FROM tasks WHERE id = :id", id=task_id) == ("pending", False)
    assert auditor.audit().findings == ()
    pauses.resume(database, str(run_id))
    force(database, "UPDATE tasks SET available_at = available_at - interval '5 min'")
    auditor.audit()
    assert one(database, "SELECT in_line FROM tasks").in_line


def test_what_has_moved_since_the_look_is_left_alone(database: Database, settings: Settings) -> None:
    task_id, attempt_id, instance_id = running(database)
    force(database, "DELETE FROM leases")
    seen = look(database, settings)
    assert [finding.name for finding in seen.findings] == ["attempt.without_lease"]
    lease(database, attempt_id, instance_id)
    (finding,) = audit.repair(database, settings, seen, RETRY)
    assert finding.repaired == 0
    assert one(database, "SELECT state FROM tasks WHERE id = :id", id=task_id).state == "running"


def _audits(database: Database) -> list[tuple[str, object]]:
    return [(kind, data["finding"]) for kind, data in facts(database) if kind.startswith("audit.")]


def test_an_alarm_is_raised_once_and_cleared_once_also_by_the_next_auditor(
    database: Database, settings: Settings
) -> None:
    auditor, successor = Auditor(database, settings), Auditor(database, settings)
    auditor.audit()
    assert _audits(database) == []
    faults_used_up(database)
    for one_of_them in (auditor, auditor, successor):
        one_of_them.audit()
    assert _audits(database) == [("audit.alarm", "task.tries_used_up")]
    ((_, data),) = [fact for fact in facts(database) if fact[0] == "audit.alarm"]
    assert data["count"] == 1
    assert len(data["ids"]) == 1
    force(database, "UPDATE tasks SET faults = 0")
    for one_of_them in (successor, Auditor(database, settings)):
        one_of_them.audit()
    assert _audits(database) == [("audit.alarm", "task.tries_used_up"), ("audit.cleared", "task.tries_used_up")]


def test_one_auditor_looks_at_a_time_and_another_takes_over(database: Database, settings: Settings) -> None:
    faults_used_up(database)
    elsewhere = Leadership(database, AUDITOR)
    assert elsewhere.held()
    with in_background(Auditor(database, settings).run), in_background(Auditor(database, settings).run):
        time.sleep(0.5)
        assert _audits(database) == []
        elsewhere.release()
        eventually(lambda: _audits(database))
        time.sleep(0.5)
    assert _audits(database) == [("audit.alarm", "task.tries_used_up")]


def test_the_command_says_what_is_wrong_and_mends_it_when_told(database: Database, megaflow: CommandLine) -> None:
    in_order(database)
    assert "every invariant holds" in megaflow("audit")
    no_lease(database)
    found = megaflow.run("audit")
    assert found.exit_code == 1
    assert "attempt.without_lease" in found.output
    assert "--repair" in found.output
    assert "repaired 2" in megaflow("audit", "--repair")
    assert _audits(database) == [], "a person who looks raises no alarm"
