"""The ledger against a real PostgreSQL: what is accepted, who may write, what follows from an end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import text
from sqlalchemy.exc import InternalError

import app.models.experience_tables
import app.models.service_tables  # noqa: F401  adds its tables to those of Base
from app.errors import IdempotencyConflict, IllegalMove, StaleWriter, UnknownName
from app.ledger import accept, attempts, ends, events, instances, results, tasks, waiting
from app.ledger.accept import NewRun
from app.ledger.database import Database
from app.models.endings import EndReason
from app.models.outcome import Artifact, ArtifactKind, Phase, Verdict, WakeUpMessage
from app.models.spec import Mode
from app.models.states import ATTEMPT_MOVES, INSTANCE_MOVES, TASK_MOVES, TaskState
from app.models.tables import Base
from tests.building import (
    RETRY,
    a_spec,
    accepted,
    claim_of,
    claimed,
    dispatched,
    failed,
    new_id,
    next_of,
    ready_instance,
)


def _environment(database: Database) -> dict[str, Any]:
    return dict(database.sql("SELECT environment FROM attempts").scalar_one())


GOOD = Verdict(reward=1.0, counts=True)


def test_every_task_of_a_run_is_there_when_accept_returns(database: Database) -> None:
    run = accept.accept(database, NewRun(specs=[a_spec("a"), a_spec("b")], replicas=3))
    status = results.run_status(database, run.run_id)
    assert (status.total, status.states) == (6, {"pending": 6})
    assert [result.name for result in results.results(database, run.task_ids)] == ["a"] * 3 + ["b"] * 3


def test_equal_specs_are_stored_once(database: Database) -> None:
    accept.accept(database, NewRun(specs=[a_spec("same")], replicas=16))
    accept.accept(database, NewRun(specs=[a_spec("same")], replicas=16))
    assert database.sql("SELECT count(*) FROM specs").scalar_one() == 1


def test_the_same_idempotency_key_gives_the_same_run(database: Database) -> None:
    first = accept.accept(database, NewRun(specs=[a_spec("a")], idempotency_key="k"))
    again = accept.accept(database, NewRun(specs=[a_spec("a")], idempotency_key="k"))
    assert again.existed
    assert (again.run_id, again.task_ids) == (first.run_id, first.task_ids)


def test_an_idempotency_key_of_other_tasks_is_refused(database: Database) -> None:
    accept.accept(database, NewRun(specs=[a_spec("a")], idempotency_key="k"))
    with pytest.raises(IdempotencyConflict, match="'k'"):
        accept.accept(database, NewRun(specs=[a_spec("b")], idempotency_key="k"))


def test_ten_producers_with_one_key_make_one_run(database: Database) -> None:
    new = NewRun(specs=[a_spec("a")], idempotency_key="crowd")
    with ThreadPoolExecutor(10) as crowd:
        found = list(crowd.map(lambda _: accept.accept(database, new).run_id, range(10)))
    assert len(set(found)) == 1


def test_a_task_is_admitted_once(database: Database) -> None:
    run = accepted(database)
    assert len(dispatched(database, run)) == 1
    assert dispatched(database, run) == []


def test_a_message_is_claimed_once_however_often_it_is_delivered(database: Database) -> None:
    run = accepted(database)
    (item,) = dispatched(database, run)
    instance_ids = [ready_instance(database) for _ in range(8)]
    with ThreadPoolExecutor(8) as crowd:
        claims = list(crowd.map(lambda i: attempts.claim(database, item.message, i, lease_s=30), instance_ids))
    assert sum(claim is not None for claim in claims) == 1


def test_an_ephemeral_instance_takes_one_attempt_even_in_two_threads(database: Database) -> None:
    run = accepted(database, 6, mode=Mode.EPHEMERAL)
    items = dispatched(database, run, Mode.EPHEMERAL)
    instance_id = ready_instance(database, Mode.EPHEMERAL)
    with ThreadPoolExecutor(6) as crowd:
        claims = list(crowd.map(lambda item: attempts.claim(database, item.message, instance_id, lease_s=30), items))
    assert sum(claim is not None for claim in claims) == 1


def test_an_instance_takes_only_work_of_its_mode(database: Database) -> None:
    run = accepted(database)
    (item,) = dispatched(database, run)
    other = ready_instance(database, Mode.EPHEMERAL)
    assert attempts.claim(database, item.message, other, lease_s=30) is None
    assert attempts.claim_any(database, other, lease_s=30) is None


def test_a_message_with_an_old_number_is_refused(database: Database) -> None:
    run = accepted(database)
    (item,) = dispatched(database, run)
    stale = WakeUpMessage(attempt_id=item.message.attempt_id, number=item.message.number + 1)
    assert attempts.claim(database, stale, ready_instance(database), lease_s=30) is None


def test_a_finished_task_keeps_verdict_phases_and_artifacts(database: Database) -> None:
    claim = claimed(database)
    attempts.record_phase(database, claim, Phase.ENVIRONMENT_READY, environment={"id": "c1", "origin": "fresh"})
    patch = Artifact(kind=ArtifactKind.PATCH, key="k", url="file:///k", size_bytes=3, sha256="0" * 64)
    ends.finish(database, claim, verdict=GOOD, artifacts=[patch])
    (result,) = results.results(database, [claim.task_id])
    assert (result.state, result.reward, result.end_reason) == (TaskState.SUCCEEDED, 1.0, EndReason.SUBMITTED)
    assert result.artifacts == (patch,)
    assert result.attempt is not None
    assert result.attempt.environment == {"id": "c1", "origin": "fresh"}
    passed = [Phase.ACCEPTED, Phase.ADMITTED, Phase.CLAIMED, Phase.ENVIRONMENT_READY]
    times = [result.attempt.phases[phase] for phase in passed]
    assert times == sorted(times)


def test_a_lost_attempt_may_write_no_more_and_the_next_may(database: Database) -> None:
    old = claimed(database)
    instances.exited(database, old.instance_id, -9, "killed by SIGKILL", RETRY)
    with pytest.raises(StaleWriter):
        attempts.record_phase(database, old, Phase.GRADED)
    with pytest.raises(StaleWriter):
        ends.finish(database, old, verdict=GOOD)
    new = next_of(database, old)
    assert new.number == 2
    ends.finish(database, new, verdict=GOOD)
    (result,) = results.results(database, [old.task_id])
    assert [attempt.state for attempt in result.attempts] == ["lost", "finished"]


def test_infrastructure_faults_are_retried_up_to_the_limit_and_then_not_measured(database: Database) -> None:
    claim = claimed(database, max_attempts=2)
    failed(database, claim)
    assert results.state_of(database, claim.task_id) is TaskState.PENDING
    failed(database, next_of(database, claim))
    (result,) = results.results(database, [claim.task_id])
    assert (result.state, result.reward, len(result.attempts)) == (TaskState.FAILED, None, 2)


def test_a_fault_that_is_tried_once_more_is_known_by_its_class_until_a_person_tries_again(database: Database) -> None:
    claim = claimed(database)
    assert not attempts.failed_before(database, claim, "SetupTimedOut")
    failed(database, claim, error="SetupTimedOut")
    second = next_of(database, claim)
    assert attempts.failed_before(database, second, "SetupTimedOut")
    assert not attempts.failed_before(database, second, "SetupFailed")
    failed(database, second, EndReason.INTERRUPTED, error="Stopped")
    third = next_of(database, claim)
    assert attempts.failed_before(database, third, "SetupTimedOut")
    failed(database, third, permanent=True, error="SetupTimedOut")
    assert tasks.retry(database, [claim.task_id]) == [claim.task_id]
    assert not attempts.failed_before(database, next_of(database, claim), "SetupTimedOut")


def test_an_interruption_uses_up_no_retry(database: Database) -> None:
    claim = claimed(database, max_attempts=1)
    failed(database, claim, EndReason.INTERRUPTED)
    assert results.state_of(database, claim.task_id) is TaskState.PENDING


def test_a_permanent_fault_ends_the_task_at_once(database: Database) -> None:
    claim = claimed(database)
    failed(database, claim, permanent=True)
    assert results.state_of(database, claim.task_id) is TaskState.FAILED


def test_a_lapsed_lease_is_taken_back(database: Database) -> None:
    claim = claim_of(database, accepted(database), lease_s=0.01)
    with database.begin() as connection:
        connection.execute(text("SELECT pg_sleep(0.05)"))
        assert waiting.reclaim_lapsed(connection, RETRY) == [claim.attempt_id]
    assert attempts.renew(database, [claim.attempt_id], lease_s=30) == {}


def test_a_renewed_lease_is_not_taken_back_and_says_when_to_stop(database: Database) -> None:
    claim = claimed(database)
    assert attempts.renew(database, [claim.attempt_id], lease_s=30) == {claim.attempt_id: None}
    assert tasks.cancel(database, [claim.task_id]) == [claim.attempt_id]
    assert attempts.renew(database, [claim.attempt_id], lease_s=30) == {claim.attempt_id: EndReason.CANCELLED}
    with database.begin() as connection:
        assert waiting.reclaim_lapsed(connection, RETRY) == []


def test_cancel_ends_what_waits_and_asks_what_runs(database: Database) -> None:
    run = accepted(database, 2)
    running = claimed(database)
    dispatched_run = accepted(database)
    dispatched(database, dispatched_run)
    asked = tasks.cancel(database, [*run.task_ids, running.task_id, *dispatched_run.task_ids])
    assert asked == [running.attempt_id]
    assert {results.state_of(database, i) for i in (*run.task_ids, *dispatched_run.task_ids)} == {TaskState.CANCELLED}
    assert results.state_of(database, running.task_id) is TaskState.RUNNING


def test_a_cancelled_task_that_is_lost_is_cancelled_not_retried(database: Database) -> None:
    claim = claimed(database)
    tasks.cancel(database, [claim.task_id])
    instances.exited(database, claim.instance_id, -9, "killed", RETRY)
    assert results.state_of(database, claim.task_id) is TaskState.CANCELLED


def test_retry_reopens_only_what_was_not_measured(database: Database) -> None:
    good, bad = claimed(database), claimed(database, max_attempts=1)
    ends.finish(database, good, verdict=GOOD)
    instances.exited(database, bad.instance_id, -9, "killed", RETRY)
    assert tasks.retry(database, [good.task_id, bad.task_id]) == [bad.task_id]
    (result,) = results.results(database, [bad.task_id])
    assert (result.state, len(result.attempts)) == (TaskState.PENDING, 1)


def test_events_tell_a_tasks_story_in_order(database: Database) -> None:
    claim = claimed(database)
    attempts.record_phase(database, claim, Phase.IMAGE_READY)
    ends.finish(database, claim, verdict=GOOD)
    kinds = [event.kind for event in events.of_task(database, claim.task_id)]
    assert kinds == ["attempt.admitted", "attempt.claimed", "attempt.image_ready", "attempt.finished"]


def test_an_unknown_run_is_named(database: Database) -> None:
    with pytest.raises(UnknownName, match="unknown run"):
        results.run_status(database, new_id())
    with pytest.raises(UnknownName, match="unknown task 'nothing'"):
        results.find(database, "tasks", "nothing")


@pytest.mark.parametrize(
    ("table", "moves"), [("tasks", TASK_MOVES), ("attempts", ATTEMPT_MOVES), ("instances", INSTANCE_MOVES)]
)
def test_the_database_refuses_exactly_what_the_state_machine_refuses(
    database: Database, table: str, moves: dict[str, frozenset[str]]
) -> None:
    rows = database.sql("SELECT old, new FROM legal_moves WHERE kind = :k", {"k": table})
    assert {(row.old, row.new) for row in rows} == {(old, new) for old, news in moves.items() for new in news}


def test_a_snapshot_shows_its_thread_one_moment_and_takes_no_write(database: Database) -> None:
    run = accepted(database, 1)
    with database.snapshot():
        before = results.run_status(database, run.run_id).states
        with ThreadPoolExecutor(1) as another:
            another.submit(tasks.cancel, database, run.task_ids).result()
        assert results.run_status(database, run.run_id).states == before == {"pending": 1}
    assert results.run_status(database, run.run_id).states == {"cancelled": 1}
    with pytest.raises(InternalError, match="read-only transaction"), database.snapshot():
        tasks.retry(database, run.task_ids)
    assert results.run_status(database, run.run_id).states == {"cancelled": 1}


def test_an_illegal_move_is_refused_even_from_plain_sql(database: Database) -> None:
    run = accepted(database)
    with pytest.raises(IllegalMove, match="succeeded may not follow pending"), database.begin() as connection:
        connection.execute(text("UPDATE tasks SET state = 'succeeded' WHERE run_id = :r"), {"r": run.run_id})
    assert results.state_of(database, run.task_ids[0]) is TaskState.PENDING


def test_the_migrations_make_exactly_the_tables_of_the_code(database: Database) -> None:
    with database.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []


def test_a_stale_message_leads_to_other_work_that_waits(database: Database) -> None:
    run = accepted(database, 2)
    first, second = dispatched(database, run)
    instance_id = ready_instance(database)
    assert attempts.claim(database, first.message, instance_id, lease_s=30) is not None
    assert attempts.claim(database, first.message, instance_id, lease_s=30) is None
    other = attempts.claim_any(database, instance_id, lease_s=30)
    assert other is not None
    assert other.attempt_id == second.message.attempt_id


def test_samples_of_two_workers_are_kept_side_by_side_and_in_no_event(database: Database) -> None:
    claim = claimed(database)
    ends.record_teardown(database, claim, {"teardown": {"x": {}}})
    assert "samples" not in _environment(database)
    for purpose in ("agent", "grading"):
        ends.record_teardown(database, claim, {"teardown": {purpose: {}}}, {purpose: {"rows": [[5, 100, 0.5]]}})
    found = _environment(database)
    assert found["samples"] == {purpose: {"rows": [[5, 100, 0.5]]} for purpose in ("agent", "grading")}
    assert found["teardown"].keys() == {"x", "agent", "grading"}
    data = database.sql("SELECT data FROM events WHERE kind = 'attempt.torn_down'").scalars().all()
    assert len(data) == 3
    assert not any("samples" in one for one in data)


def test_an_exit_is_recorded_once(database: Database) -> None:
    instance_id = ready_instance(database)
    assert instances.exited(database, instance_id, 0, "exit code 0", RETRY)
    assert not instances.exited(database, instance_id, -9, "again", RETRY)
