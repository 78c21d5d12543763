"""Tasks that come after others, against a real PostgreSQL: who is released, cancelled and tried again, and when."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from sqlalchemy.exc import IntegrityError

from app.client import MegaFlow
from app.errors import DatabaseUnavailable, IdempotencyConflict, OptionInvalid, StaleWriter, UnknownName
from app.ledger import (
    accept,
    admission,
    audit,
    ends,
    explain,
    explain_run,
    graphs,
    pauses,
    results,
    tasks,
    waiting,
)
from app.ledger.accept import Accepted, NewRun
from app.ledger.attempts import Claim, claim_any
from app.ledger.database import Database
from app.models.endings import EndReason
from app.models.graphs import UPSTREAM_NOT_SUCCEEDED, ArtifactReference, ComesAfter
from app.models.outcome import Artifact, ArtifactKind, Failure, Verdict
from app.models.spec import Mode
from app.models.states import TaskState
from app.settings import Settings
from tests.building import RETRY, a_spec, accepted, new_id, ready_instance, taken
from tests.integration.command import CommandLine
from tests.integration.rows import every, facts, one, paused, write
from tests.waiting import eventually

_FAILED = Failure(error="Broken", message="as the test wants it")


def after(
    database: Database,
    *upstream: UUID,
    count: int = 1,
    inputs: Mapping[str, ArtifactReference] | None = None,
    **options: object,
) -> Accepted:
    """A run that comes after these."""
    new = NewRun([a_spec(f"later-{n}") for n in range(count)], upstream=ComesAfter(frozenset(upstream), inputs or {}))
    for name, value in options.items():
        object.__setattr__(new, name, value)
    return accept.accept(database, new)


def a_pair(database: Database) -> tuple[UUID, UUID]:
    """Two tasks, one after the other."""
    (first,) = accepted(database).task_ids
    return first, after(database, first).task_ids[0]


def a_pass(database: Database) -> list[UUID]:
    """What the dispatcher does in a pass with room for all; the tasks admitted."""
    with database.begin() as connection:
        admission.in_turn(connection)
        graphs.settle(connection, 10_000)
        admission.promote(connection, 10_000)
    rows = every(database, "SELECT id FROM tasks WHERE state = 'pending' AND in_line ORDER BY id")
    with database.begin() as connection:
        admission.admit(connection, [(row.id, Mode.PERSISTENT) for row in rows])
    return [row.id for row in rows]


def begin(database: Database, task_id: UUID) -> Claim:
    """Claim the attempt of an admitted task."""
    row = one(database, "SELECT id, number FROM attempts WHERE task_id = :id AND state = 'dispatched'", id=task_id)
    with database.begin() as connection:
        messages = admission.unpublished(connection, 0.0, 10_000)
    (message,) = [item.message for item in messages if item.message.attempt_id == row.id]
    return taken(database, message, lease_s=300)


def succeed(database: Database, claimed: Claim, artifacts: Sequence[Artifact] = (), reward: float = 0.0) -> None:
    ends.finish(database, claimed, verdict=Verdict(reward=reward, counts=True), artifacts=artifacts)


def fail(database: Database, claimed: Claim, reason: EndReason = EndReason.INVALID_SPEC) -> None:
    """One that is `LOST` is tried again."""
    permanent = reason is EndReason.INVALID_SPEC
    ends.fail(database, claimed, end_reason=reason, failure=_FAILED, permanent=permanent, retry=RETRY)


def state(database: Database, task_id: UUID) -> TaskState:
    return results.state_of(database, task_id)


def why(database: Database, task_id: UUID) -> str:
    failure = one(database, "SELECT failure FROM tasks WHERE id = :id", id=task_id).failure
    assert failure["error"] == UPSTREAM_NOT_SUCCEEDED
    return str(failure["message"])


def clean(database: Database, settings: Settings) -> bool:
    """Whether the auditor finds nothing about states; it looks at what has just moved, too."""
    write(database, "UPDATE tasks SET accepted_at = accepted_at - interval '1 day'")
    found = {one.name for one in audit.look(database, settings).findings}
    return not {name for name in found if name.startswith(("task.", "attempt.not", "attempt.out"))}


def test_a_task_waits_until_what_it_comes_after_has_succeeded(database: Database, settings: Settings) -> None:
    first, second = a_pair(database)
    assert a_pass(database) == [first]
    claimed = begin(database, first)
    assert a_pass(database) == []
    succeed(database, claimed, reward=0.0)  # whatever the reward
    assert state(database, second) == "pending"
    assert a_pass(database) == [second]
    assert [data for kind, data in facts(database) if kind == "task.released"] == [{}]
    assert clean(database, settings)


def test_a_task_waits_for_all_of_them_and_so_do_all_tasks_of_a_run(database: Database) -> None:
    many = accepted(database, 5).task_ids
    waiting = after(database, *many, count=4).task_ids
    assert a_pass(database) == list(many)
    for task_id in many[:4]:
        succeed(database, begin(database, task_id))
        assert a_pass(database) == []
    succeed(database, begin(database, many[4]))
    assert a_pass(database) == list(waiting)


def test_an_infrastructure_fault_of_an_attempt_releases_and_cancels_nothing(database: Database) -> None:
    first, second = a_pair(database)
    a_pass(database)
    fail(database, begin(database, first), EndReason.LOST)
    assert a_pass(database) == [first]
    assert state(database, second) == "pending"
    succeed(database, begin(database, first))
    assert a_pass(database) == [second]


def test_the_database_itself_refuses_to_put_in_line_what_waits(database: Database) -> None:
    _, second = a_pair(database)
    for change in ("in_line = true", "state = 'admitted'"):
        with pytest.raises(IntegrityError, match="tasks_waits_check"):
            write(database, f"UPDATE tasks SET {change} WHERE id = :id", id=second)


def test_a_failure_cancels_all_that_comes_after_it_down_the_graph(database: Database, settings: Settings) -> None:
    first, second = a_pair(database)
    (third,) = after(database, second).task_ids
    (aside,) = accepted(database).task_ids
    (both,) = after(database, aside, third).task_ids
    a_pass(database)
    fail(database, begin(database, first))
    a_pass(database)
    for task_id, upstream in ((second, first), (third, second), (both, third)):
        (result,) = results.results(database, [task_id])
        assert (result.state, result.end_reason, result.reward) == ("cancelled", "cancelled", None)
        assert str(upstream) in why(database, task_id)
    assert "failed (invalid_spec)" in why(database, second)
    told = [data["after"] for kind, data in facts(database) if kind == "task.upstream_ended"]
    assert told == [str(first), str(second), str(third)]
    assert state(database, aside) == "admitted"
    assert clean(database, settings)


def test_cancelling_the_root_cancels_the_rest_at_once(database: Database, settings: Settings) -> None:
    (root,) = accepted(database).task_ids
    (second,) = after(database, root).task_ids
    third = after(database, second, count=3).task_ids
    a_pass(database)
    claimed = begin(database, root)
    assert tasks.cancel(database, [root]) == [claimed.attempt_id]
    assert state(database, root) == "running"  # until its worker has stopped
    assert {state(database, one) for one in (second, *third)} == {"cancelled"}
    assert f"({root}), after which it comes, is being cancelled" in why(database, second)
    assert a_pass(database) == []
    assert clean(database, settings)


def test_cancelling_what_waits_leaves_what_it_waits_for_alone(database: Database) -> None:
    (root,) = accepted(database).task_ids
    (second,) = after(database, root).task_ids
    (third,) = after(database, second).task_ids
    tasks.cancel(database, [second])
    assert [state(database, one) for one in (root, second, third)] == ["pending", "cancelled", "cancelled"]


def test_an_expired_task_and_a_superseded_one_cancel_what_comes_after_them(database: Database) -> None:
    (expired, second), (superseded, fourth) = a_pair(database), a_pair(database)
    write(database, "UPDATE tasks SET deadline_at = now() - interval '1 s' WHERE id = :id", id=expired)
    with database.begin() as connection:
        tasks.expire(connection, RETRY)
        tasks.end(connection, [superseded], EndReason.SUPERSEDED)
    a_pass(database)
    assert "cancelled (expired)" in why(database, second)
    assert "cancelled (superseded)" in why(database, fourth)


def test_what_failed_before_cancels_what_is_submitted_after_it(database: Database) -> None:
    (first,) = accepted(database).task_ids
    tasks.cancel(database, [first])
    a_pass(database)
    (second,) = after(database, first).task_ids
    assert a_pass(database) == []
    assert state(database, second) == "cancelled"


def test_what_comes_after_a_failure_is_tried_again_after_it(database: Database, settings: Settings) -> None:
    first, second = a_pair(database)
    (third,) = after(database, second).task_ids
    a_pass(database)
    fail(database, begin(database, first))
    a_pass(database)
    assert tasks.retry(database, [second, third]) == []
    for one_of in (first, second, third):
        assert tasks.retry(database, [one_of]) == [one_of]
    assert one(database, "SELECT failure FROM tasks WHERE id = :id", id=second).failure is None
    assert a_pass(database) == [first]
    succeed(database, begin(database, first))
    assert a_pass(database) == [second]
    succeed(database, begin(database, second))
    assert a_pass(database) == [third]
    assert clean(database, settings)


def test_a_retry_leaves_what_comes_after_another_failure(database: Database) -> None:
    first, other = accepted(database, 2).task_ids
    (second,) = after(database, first, other).task_ids
    tasks.cancel(database, [first, other])
    assert tasks.retry(database, [first]) == [first]
    assert tasks.retry(database, [second]) == []
    assert tasks.retry(database, [other]) == [other]
    assert tasks.retry(database, [second]) == [second]


def test_a_task_cancelled_by_hand_waits_again_when_it_is_tried_again(database: Database) -> None:
    first, second = a_pair(database)
    tasks.cancel(database, [second])
    assert tasks.retry(database, [second]) == [second]
    assert a_pass(database) == [first]
    succeed(database, begin(database, first))
    assert a_pass(database) == [second]


def test_a_pause_and_its_end_release_nothing_and_hold_what_is_released(database: Database) -> None:
    (first,) = accepted(database).task_ids
    run = after(database, first)
    pauses.pause(database, str(run.run_id))
    pauses.resume(database, str(run.run_id))
    assert a_pass(database) == [first]
    pauses.pause(database, str(run.run_id))
    succeed(database, begin(database, first))
    assert a_pass(database) == []
    pauses.resume(database, str(run.run_id))
    assert a_pass(database) == list(run.task_ids)


def test_what_waits_expires(database: Database) -> None:
    (first,) = accepted(database).task_ids
    run = after(database, first, deadline_at=datetime.now(UTC) + timedelta(hours=1))
    write(database, "UPDATE tasks SET deadline_at = now() - interval '1 s' WHERE run_id = :id", id=run.run_id)
    with database.begin() as connection:
        tasks.expire(connection, RETRY)
    (second,) = results.results(database, run.task_ids)
    assert (second.state, second.end_reason) == ("cancelled", "expired")
    a_pass(database)
    succeed(database, begin(database, first))
    assert a_pass(database) == []


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"relative": "patch"}, "absolute"),
        ({"/a/../b": "patch"}, "absolute"),
        ({"/folder/": "patch"}, "absolute"),
        ({"/": "patch"}, "absolute"),
        ({"/a\nb": "patch"}, "absolute"),
        ({"/" + "x" * 5000: "patch"}, "4096 bytes"),
        ({f"/{n}": "patch" for n in range(101)}, "at most 100 inputs"),
    ],
)
def test_inputs_that_cannot_be_are_refused(database: Database, inputs: dict[str, str], says: str) -> None:
    (first,) = accepted(database).task_ids
    with pytest.raises(OptionInvalid, match=says):
        after(database, inputs={path: ArtifactReference.of(first, kind) for path, kind in inputs.items()})
    assert one(database, "SELECT count(*) AS n FROM runs").n == 1


def test_all_or_nothing_is_accepted(database: Database) -> None:
    (first,) = accepted(database).task_ids
    write(database, "UPDATE tasks SET user_name = 'mallory'")
    for upstream in (first, new_id()):
        with pytest.raises(UnknownName, match=f"expected tasks of user 'default' .*{upstream}"):
            after(database, upstream)
    with pytest.raises(OptionInvalid, match="at most 1000 tasks to come after, found 1001"):
        after(database, *(new_id() for _ in range(1001)))
    with pytest.raises(UnknownName, match="unknown artifact 'path'; did you mean patch"):
        ArtifactReference.of(first, "path")
    assert one(database, "SELECT count(*) AS n FROM runs").n == 1
    assert not every(database, "SELECT FROM task_dependencies")


def test_an_idempotency_key_covers_what_a_run_comes_after(database: Database) -> None:
    first, other = accepted(database, 2).task_ids
    patch = {"/inputs/a": ArtifactReference.of(first, "patch")}
    run = after(database, first, inputs=patch, idempotency_key="k")
    assert after(database, inputs=patch, idempotency_key="k").run_id == run.run_id
    for others, inputs in (((other,), patch), ((), {}), ((), {"/inputs/b": patch["/inputs/a"]}), ((first,), {})):
        with pytest.raises(IdempotencyConflict, match="comes after other tasks"):
            after(database, *others, inputs=inputs, idempotency_key="k")


def test_the_client_takes_handles_and_their_artifacts(database: Database, settings: Settings) -> None:
    with MegaFlow(settings) as flow:
        first = flow.enqueue(a_spec().task, agent="nop")
        second = flow.enqueue(a_spec().task, agent="nop", inputs={"/inputs/a": first.artifact("patch")})
        run = flow.enqueue_many([a_spec().task] * 2, agent="nop", replicas=2, after=[first, second])
        assert [handle.task_id for handle in run.handles] == sorted(handle.task_id for handle in run.handles)
        assert a_pass(database) == [first.task_id]
        (found,) = graphs.inputs(database, second.run_id)
        assert (found.path, found.kind, found.task_id, found.key) == ("/inputs/a", "patch", first.task_id, None)
        succeed(database, begin(database, first.task_id), [Artifact(kind=ArtifactKind.PATCH, key="runs/1/patch")])
        assert a_pass(database) == [second.task_id]
        assert graphs.inputs(database, second.run_id)[0].key == "runs/1/patch"
        for wrong in ({"after": ["nope"]}, {"after": first}, {"inputs": [first]}, {"inputs": {"/x": first}}):
            with pytest.raises(OptionInvalid, match="expected after="):
                flow.enqueue(a_spec().task, agent="nop", **wrong)  # type: ignore[arg-type]


def test_a_run_is_submitted_after_another_by_its_name(
    megaflow: CommandLine, database: Database, settings: Settings
) -> None:
    first = accepted(database, 2)
    asked = ("demo", "-a", "nop", "--environment", "local", "--name", "later")
    megaflow("submit", *asked, "--after", str(first.run_id)[-12:])
    kept = "SELECT d.on_task, r.name FROM task_dependencies d JOIN runs r ON r.id = d.run_id ORDER BY d.on_task"
    assert [tuple(row) for row in every(database, kept)] == [(task, "later") for task in sorted(first.task_ids)]


def test_why_a_task_waits_is_said(megaflow: CommandLine, database: Database, settings: Settings) -> None:
    first, other = accepted(database, 2).task_ids
    run = after(database, first, other)
    now = explain.task(database, settings, run.task_ids[0]).now
    assert now is not None
    assert now.doing == f"waits for task example-0 ({first}), which is pending, and 1 more"
    assert explain_run.run(database, settings, run.run_id).comes_after == now.doing
    assert f"now it {now.doing}" in " ".join(megaflow("explain", run.run_id).split())
    a_pass(database)
    for task_id in (first, other):
        succeed(database, begin(database, task_id))
    now = explain.task(database, settings, run.task_ids[0]).now
    assert now is not None
    assert "in line with the next pass" in now.doing
    a_pass(database)
    assert explain_run.run(database, settings, run.run_id).comes_after == ""


def test_ends_at_once_of_what_several_runs_come_after_release_each_of_them(
    database: Database, settings: Settings
) -> None:
    """What one run comes after ends twice at once, by finishes, cancels and dispatchers that know nothing of it."""
    for _ in range(12):
        first = accepted(database, 6).task_ids
        runs = [after(database, *first[:4]), after(database, *reversed(first[:4])), after(database, first[4], first[5])]
        a_pass(database)
        claims = [begin(database, task_id) for task_id in first]
        start = threading.Barrier(8)

        def at_once(verb: object, *values: object, start: threading.Barrier = start) -> None:
            start.wait()
            verb(*values)  # type: ignore[operator]

        with ThreadPoolExecutor(8) as threads:
            done = [threads.submit(at_once, succeed, database, one) for one in claims[:4]]
            done.append(threads.submit(at_once, fail, database, claims[4]))
            done.append(threads.submit(at_once, tasks.cancel, database, [first[5], first[4], *runs[2].task_ids]))
            done += [threads.submit(at_once, a_pass, database) for _ in range(2)]
            for one in done:
                one.result(timeout=60)
        a_pass(database)
        assert {state(database, task_id) for run in runs[:2] for task_id in run.task_ids} == {"admitted"}
        assert state(database, runs[2].task_ids[0]) == "cancelled"
    assert clean(database, settings)


class _Workers:
    """Producers, workers, people and dispatchers, all at once and in any order, until all has ended."""

    def __init__(self, database: Database, seed: int) -> None:
        self._database = database
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.tasks: list[UUID] = []
        self.early: list[UUID] = []
        self.quiet = threading.Event()

    def _chosen(self, most: int) -> list[UUID]:
        with self._lock:
            return self._random.sample(self.tasks, min(len(self.tasks), self._random.randint(0, most)))

    def _drawn(self) -> float:
        with self._lock:
            return self._random.random()

    def produce(self, runs: int) -> None:
        for _ in range(runs):
            upstream = self._chosen(3)
            made = after(self._database, *upstream, count=1 + int(3 * self._drawn()), priority=int(3 * self._drawn()))
            with self._lock:
                self.tasks += made.task_ids

    def work(self) -> None:
        instance = ready_instance(self._database)
        while not self.quiet.is_set():
            found = claim_any(self._database, instance, lease_s=300)
            if found is None:
                time.sleep(0.002)
                continue
            if every(self._database, f"{_EARLY} AND t.id = :id", id=found.task_id):
                self.early.append(found.task_id)
            with suppress(StaleWriter):
                draw = self._drawn()
                if draw < 0.7:
                    succeed(self._database, found)
                elif draw < 0.85:
                    fail(self._database, found, EndReason.LOST)
                else:
                    fail(self._database, found)

    def disturb(self) -> None:
        while not self.quiet.is_set():
            ids, draw = self._chosen(2), self._drawn()
            with suppress(DatabaseUnavailable):  # of two writers that wait for each other one is told to try again
                if draw < 0.3:
                    tasks.cancel(self._database, ids)
                elif draw < 0.6:
                    tasks.retry(self._database, ids)
                elif ids:
                    run = one(self._database, "SELECT run_id FROM tasks WHERE id = :id", id=ids[0]).run_id
                    (pauses.pause if draw < 0.75 else pauses.resume)(self._database, str(run))
            time.sleep(0.005)

    def dispatch(self) -> None:
        while not self.quiet.is_set():
            self.pass_once()
            time.sleep(0.002)

    def pass_once(self) -> None:
        with self._database.begin() as connection:
            admission.in_turn(connection)
            graphs.settle(connection, 7)
            admission.promote(connection, 100)
            queued = [(queue, 20) for queue in waiting.queues(connection)]
            heads = [head for found in waiting.heads(connection, queued).values() for head in found]
            admission.admit(connection, [(head.task_id, Mode.PERSISTENT) for head in heads])


_EARLY = (
    "SELECT t.id FROM tasks t JOIN task_dependencies d ON d.run_id = t.run_id JOIN tasks u ON u.id = d.on_task"
    " WHERE u.state <> 'succeeded' AND (t.in_line OR t.state IN ('admitted', 'running', 'succeeded'))"
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(4))
def test_no_order_of_ends_in_any_graph_begins_a_task_early_or_leaves_one_waiting(
    database: Database, settings: Settings, seed: int
) -> None:
    world = _Workers(database, seed)
    with ThreadPoolExecutor(7) as threads:
        disturbed = [threads.submit(world.disturb), threads.submit(world.disturb)]
        going = [threads.submit(verb) for verb in (world.work, world.work, world.dispatch, world.dispatch)]
        try:
            threads.submit(world.produce, 40).result(timeout=120)
            assert every(database, _EARLY) == []
        finally:
            world.quiet.set()
        for one_of in disturbed + going:
            one_of.result(timeout=60)
    for pause in paused(database):
        pauses.resume(database, pause.name)
    world.quiet.clear()
    with ThreadPoolExecutor(2) as threads:
        going = [threads.submit(world.work), threads.submit(world.dispatch)]
        try:
            # A pass after the last end sees to those that have dependents.
            left = f"{_GOES_ON} UNION SELECT id FROM tasks WHERE has_dependents"
            eventually(lambda: not every(database, left), "an end of every task", within_s=120)
        finally:
            world.quiet.set()
        for one_of in going:
            one_of.result(timeout=60)
    assert world.early == []
    assert every(database, _EARLY) == []
    assert every(database, "SELECT id FROM tasks WHERE has_dependents") == []
    assert {row.state for row in every(database, "SELECT DISTINCT state FROM tasks")} >= {"succeeded", "cancelled"}
    assert clean(database, settings)


_GOES_ON = "SELECT id FROM tasks WHERE state IN ('pending', 'admitted', 'running')"
