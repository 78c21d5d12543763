"""The ledger as a state machine against a real PostgreSQL: whatever order things happen in, the promises hold."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule, run_state_machine_as_test
from sqlalchemy import text

from app.errors import StaleWriter
from app.ledger import accept, admission, attempts, ends, gradings, graphs, instances, replicas, tasks, waiting
from app.ledger.accept import NewRun
from app.ledger.admission import QueuedMessage
from app.ledger.attempts import Claim
from app.ledger.database import Database
from app.models.endings import EndReason
from app.models.graphs import ComesAfter
from app.models.instance import InstanceMode
from app.models.outcome import AgentResult, Failure, Verdict, WakeUpMessage
from app.models.spec import Mode
from tests.building import RETRY, a_spec, ready_instance

modes = st.sampled_from([Mode.EPHEMERAL, Mode.PERSISTENT])
faults = st.sampled_from(
    [EndReason.ENVIRONMENT_ERROR, EndReason.MODEL_ERROR, EndReason.INTERRUPTED, EndReason.CANCELLED]
)


class LedgerMachine(RuleBasedStateMachine):
    """Producers, dispatchers, workers, crashes and people, one step at a time, in any order."""

    database: Database

    pending = Bundle("pending")
    hints = Bundle("hints")
    standing = Bundle("standing")
    claims = Bundle("claims")
    graders = Bundle("graders")

    def __init__(self) -> None:
        super().__init__()
        self.finished: set[object] = set()
        self.database.sql(
            "TRUNCATE specs, runs, tasks, attempts, gradings, leases, instances, events, artifacts CASCADE"
        )

    @rule(target=pending, mode=modes, replicas=st.integers(1, 3))
    def accept_tasks(self, mode: Mode, replicas: int) -> object:
        new = NewRun(specs=[a_spec("t", mode=mode, max_attempts=2)], replicas=replicas)
        return multiple(*((task_id, mode) for task_id in accept.accept(self.database, new).task_ids))

    @rule(target=pending, task=pending, mode=modes, replicas=st.integers(1, 2))
    def accept_after(self, task: tuple[object, Mode], mode: Mode, replicas: int) -> object:
        upstream = ComesAfter(frozenset([task[0]]))  # type: ignore[list-item]
        new = NewRun(specs=[a_spec("t", mode=mode, max_attempts=2)], replicas=replicas, upstream=upstream)
        return multiple(*((task_id, mode) for task_id in accept.accept(self.database, new).task_ids))

    @rule(target=pending, first=pending, second=pending)
    def accept_after_two(self, first: tuple[object, Mode], second: tuple[object, Mode]) -> object:
        upstream = ComesAfter(frozenset([first[0], second[0]]))  # type: ignore[list-item]
        new = NewRun(specs=[a_spec("t", mode=first[1], max_attempts=2)], upstream=upstream)
        return multiple(*((task_id, first[1]) for task_id in accept.accept(self.database, new).task_ids))

    @rule(target=hints)
    def dispatch(self) -> object:
        """Admit whatever waits."""
        with self.database.begin() as connection:
            admission.in_turn(connection)
            graphs.settle(connection, 1000)
            admission.promote(connection, 1000)
            lines = [(line, 100) for line in waiting.queues(connection)]
            chosen = [(c.task_id, line.mode) for line, found in waiting.heads(connection, lines).items() for c in found]
            return multiple(*admission.admit(connection, chosen))

    @rule(target=standing, mode=modes)
    def instance_ready(self, mode: Mode) -> object:
        return ready_instance(self.database, mode)

    @rule(target=claims, item=hints, instance_id=standing)
    def deliver(self, item: QueuedMessage, instance_id: object) -> object:
        """Any hint, to any instance, any number of times."""
        claim = attempts.claim(self.database, item.message, instance_id, lease_s=30)  # type: ignore[arg-type]
        return multiple(claim) if claim else multiple()

    @rule(target=claims, instance_id=standing)
    def ask_for_work(self, instance_id: object) -> object:
        claim = attempts.claim_any(self.database, instance_id, lease_s=30)  # type: ignore[arg-type]
        return multiple(claim) if claim else multiple()

    @rule(target=graders)
    def grader_ready(self) -> object:
        return ready_instance(self.database, InstanceMode.GRADING)

    @rule(claim=claims)
    def hand_over(self, claim: Claim) -> None:
        """An agent ends, and its attempt is to be graded apart."""
        result = AgentResult(end_reason=EndReason.SUBMITTED)
        with suppress(StaleWriter):
            gradings.hand_over(self.database, claim, result)

    @rule(target=claims, claim=claims, instance_id=graders)
    def grade(self, claim: Claim, instance_id: object) -> object:
        """The message of any grading, to any grader, any number of times."""
        message = WakeUpMessage(attempt_id=claim.attempt_id, number=claim.number)
        found = gradings.claim(self.database, message, instance_id, lease_s=30)  # type: ignore[arg-type]
        return multiple(found.claimed) if found else multiple()

    @rule(claim=claims, fault=st.booleans())
    def put_back(self, claim: Claim, fault: bool) -> None:
        with suppress(StaleWriter):
            gradings.put_back(self.database, claim, Failure(error="x", message="x") if fault else None, RETRY)

    @rule(claim=claims)
    def finish(self, claim: Claim) -> None:
        """A worker reports, perhaps for the second time, perhaps long after it was given up."""
        try:
            ends.finish(self.database, claim, verdict=Verdict(reward=1.0, counts=True))
        except StaleWriter:
            return
        assert claim.task_id not in self.finished, "a task was finished twice"
        self.finished.add(claim.task_id)

    @rule(claim=claims, reason=faults)
    def fail(self, claim: Claim, reason: EndReason) -> None:
        if claim.grading and reason is EndReason.INTERRUPTED:
            return  # put back
        with suppress(StaleWriter):
            failure = Failure(error="x", message="x")
            ends.fail(self.database, claim, end_reason=reason, failure=failure, retry=RETRY)

    @rule(claim=claims)
    def renew(self, claim: Claim) -> None:
        attempts.renew(self.database, [claim.attempt_id], lease_s=30)

    @rule(instance_id=st.one_of(standing, graders), code=st.sampled_from([0, -9, 75]))
    def instance_dies(self, instance_id: object, code: int) -> None:
        instances.exited(self.database, instance_id, code, "died", RETRY)  # type: ignore[arg-type]
        assert not instances.exited(self.database, instance_id, code, "again", RETRY)  # type: ignore[arg-type]

    @rule()
    def leases_lapse(self) -> None:
        with self.database.begin() as connection:
            connection.execute(text("UPDATE leases SET expires_at = clock_timestamp() - interval '1 s'"))
            waiting.reclaim_lapsed(connection, RETRY)

    @rule(task=pending)
    def cancel(self, task: tuple[object, Mode]) -> None:
        tasks.cancel(self.database, [task[0]])  # type: ignore[list-item]

    @rule(task=pending)
    def supersede(self, task: tuple[object, Mode]) -> None:
        """Its group is complete; what is being claimed at this moment is left to the next round."""
        with self.database.begin() as connection:
            tasks.end(connection, [task[0]], EndReason.SUPERSEDED)  # type: ignore[list-item]

    @rule()
    def superseded_ones_are_taken_away(self) -> None:
        with self.database.begin() as connection:
            connection.execute(
                text(
                    "UPDATE tasks SET cancel_requested_at = now() - interval '1 min' WHERE cancel_reason = 'superseded'"
                )
            )
            replicas.stop_superseded(connection, 30, RETRY)

    @rule(task=pending)
    def retry(self, task: tuple[object, Mode]) -> None:
        tasks.retry(self.database, [task[0]])  # type: ignore[list-item]

    def _none(self, statement: str) -> None:
        assert self.database.sql(statement).first() is None, statement

    @invariant()
    def one_live_attempt_per_task(self) -> None:
        self._none(
            "SELECT task_id FROM attempts WHERE state IN ('dispatched', 'running', 'grading') GROUP BY 1"
            " HAVING count(*) > 1"
        )

    @invariant()
    def a_lease_for_exactly_every_running_attempt(self) -> None:
        self._none(
            "SELECT 1 FROM leases l FULL JOIN (SELECT id FROM attempts WHERE state = 'running' UNION ALL"
            " SELECT attempt_id FROM gradings WHERE instance_id IS NOT NULL) a"
            " ON a.id = l.attempt_id WHERE l.attempt_id IS NULL OR a.id IS NULL"
        )

    @invariant()
    def tasks_and_attempts_tell_the_same_story(self) -> None:
        self._none(
            "SELECT 1 FROM tasks t LEFT JOIN attempts a ON a.task_id = t.id AND a.number = t.attempts"
            " WHERE (t.state = 'admitted' AND a.state IS DISTINCT FROM 'dispatched')"
            " OR (t.state = 'running' AND (a.state IN ('running', 'grading')) IS NOT TRUE)"
            " OR (t.state = 'succeeded' AND a.state IS DISTINCT FROM 'finished')"
            " OR (t.state IN ('pending', 'failed', 'cancelled') AND a.state IN ('dispatched', 'running', 'grading'))"
        )

    @invariant()
    def a_row_for_exactly_every_attempt_in_grading(self) -> None:
        self._none(
            "SELECT 1 FROM gradings g FULL JOIN (SELECT id FROM attempts WHERE state = 'grading') a"
            " ON a.id = g.attempt_id WHERE g.attempt_id IS NULL OR a.id IS NULL"
        )

    @invariant()
    def attempts_are_numbered_without_gaps(self) -> None:
        self._none(
            "SELECT 1 FROM tasks t WHERE t.attempts <> (SELECT count(*) FROM attempts WHERE task_id = t.id)"
            " OR t.attempts <> (SELECT coalesce(max(number), 0) FROM attempts WHERE task_id = t.id)"
        )

    @invariant()
    def an_ephemeral_instance_has_at_most_one_attempt(self) -> None:
        self._none(
            "SELECT 1 FROM attempts a JOIN instances i ON i.id = a.instance_id WHERE i.mode = 'ephemeral'"
            " GROUP BY i.id HAVING count(*) > 1"
        )

    @invariant()
    def a_dead_instance_runs_nothing(self) -> None:
        self._none(
            "SELECT 1 FROM attempts a JOIN instances i ON i.id = a.instance_id"
            " WHERE a.state = 'running' AND i.state IN ('terminated', 'failed') UNION ALL SELECT 1 FROM gradings g"
            " JOIN instances i ON i.id = g.instance_id WHERE i.state IN ('terminated', 'failed')"
        )

    @invariant()
    def what_is_superseded_has_ended_or_is_ending_and_never_waits_again(self) -> None:
        self._none(
            "SELECT 1 FROM tasks WHERE cancel_reason = 'superseded' AND (state IN ('pending', 'succeeded', 'failed')"
            " OR state = 'cancelled' AND end_reason <> 'superseded')"
        )

    @invariant()
    def nothing_begins_before_what_it_comes_after_has_succeeded(self) -> None:
        self._none(
            "SELECT 1 FROM tasks t JOIN task_dependencies d ON d.run_id = t.run_id JOIN tasks u ON u.id = d.on_task"
            " WHERE u.state <> 'succeeded' AND (t.attempts > 0 OR t.in_line OR t.state = 'pending' AND NOT t.waits)"
        )

    @invariant()
    def what_waits_is_seen_to_when_the_last_of_it_has_ended(self) -> None:
        self._none(
            "SELECT 1 FROM tasks t WHERE t.state = 'pending' AND t.waits AND NOT EXISTS (SELECT FROM"
            " task_dependencies d JOIN tasks u ON u.id = d.on_task WHERE d.run_id = t.run_id AND u.has_dependents)"
        )

    @invariant()
    def what_is_not_measured_has_no_reward(self) -> None:
        self._none("SELECT 1 FROM tasks WHERE state <> 'succeeded' AND verdict IS NOT NULL")


@pytest.mark.timeout(240)
def test_no_order_of_events_breaks_a_promise(database: Database) -> None:
    class Machine(LedgerMachine):
        pass

    Machine.database = database
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=25, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
