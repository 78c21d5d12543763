"""Groups of a training run against a real PostgreSQL: quorum, repair, hedges, adaptive replicas."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from app.artifacts.folder import FolderStore
from app.errors import IdempotencyConflict, SampleRefused, SpecInvalid
from app.experience.maker import SampleMaker
from app.ledger import accept, admission, ends, experience, pauses, replicas, results, tasks, waiting
from app.ledger.accept import Accepted, NewRun
from app.ledger.attempts import Claim
from app.ledger.database import Database
from app.ledger.experience import ExperienceCounts, ExperienceRun
from app.model_service.trajectory import artifact
from app.models.endings import EndReason
from app.models.groups import Adaptive, GroupRules, first_replicas
from app.models.outcome import Artifact, ArtifactKind, Verdict, WakeUpMessage
from tests.building import RETRY, a_spec, failed, taken
from tests.integration.rows import ago, every, facts, one, write
from tests.unit.test_trajectory import a_conversation


class Training:
    """A run of groups, and what its workers and the control plane do, one step at a time."""

    def __init__(self, database: Database, store: FolderStore) -> None:
        self.database = database
        self.store = store
        self.told: list[UUID] = []
        self.run_id = UUID(int=0)

    def submit(
        self, replicas: int | Adaptive = 4, quorum: int | None = None, hedge_after: str | None = None, **given: Any
    ) -> Accepted:
        new = NewRun(
            specs=[a_spec(f"task-{n}", max_attempts=2) for n in range(given.pop("tasks", 1))],
            replicas=first_replicas(replicas),
            groups=GroupRules.of(replicas, quorum, hedge_after),
            purpose="training",
            idempotency_key=given.pop("key", None),
        )
        found = accept.accept(self.database, new)
        self.run_id = found.run_id
        experience.open_run(self.database, ExperienceRun(found.run_id, "policy", **given))
        experience.publish(self.database, "policy", "v1")
        experience.settle(self.database, "policy", "v1")
        return found

    def begin(self) -> list[Claim]:
        """Everything that waits is claimed, in the order of the queue."""
        with self.database.begin() as connection:
            admission.promote(connection, 1000)
            queues = [(queue, 100) for queue in waiting.queues(connection)]
            chosen = [(c.task_id, q.mode) for q, found in waiting.heads(connection, queues).items() for c in found]
            messages = [item.message for item in admission.admit(connection, chosen)]
        return [taken(self.database, one, lease_s=60) for one in messages]

    def claims(self) -> list[Claim]:
        """What the dispatcher has admitted is claimed."""
        rows = every(self.database, "SELECT id, number FROM attempts WHERE state = 'dispatched' ORDER BY id")
        messages = [WakeUpMessage(attempt_id=row.id, number=row.number) for row in rows]
        return [taken(self.database, one, lease_s=60) for one in messages]

    def finish(self, *claims: Claim, reward: float = 1.0) -> None:
        """Graded, with recorded calls."""
        for claim in claims:
            (call,) = a_conversation("a")
            ids = {"prompt_token_ids": (1, 2), "token_ids": (7, 8), "logprobs": (-0.5, -0.25), "policy_version": "v1"}
            key = f"runs/{claim.run_id}/{claim.task_id}/{claim.number}/model_calls.jsonl.zst"
            self.store.put(key, artifact.export([replace(call, **ids)]))
            kept = [Artifact(kind=ArtifactKind.MODEL_CALLS, key=key)]
            verdict = Verdict(reward=reward, counts=True)
            ends.finish(self.database, claim, verdict=verdict, artifacts=kept)

    def lose(self, *claims: Claim) -> None:
        """To infrastructure, with all of their attempts."""
        for claim in claims:
            self.fail(claim)
            self.fail(*self.begin())

    def lose_all_twice(self) -> None:
        for _ in range(2):
            self.lose(*self.begin())
            self.record()

    def fail(self, *claims: Claim, reason: EndReason = EndReason.ENVIRONMENT_ERROR, permanent: bool = False) -> None:
        for claim in claims:
            failed(self.database, claim, reason, permanent=permanent)

    def record(self) -> ExperienceCounts:
        while SampleMaker(self.database, self.store, self.told.extend).pass_once():
            pass
        return experience.counts(self.database, self.run_id)

    def tend(self) -> ExperienceCounts:
        self.told += replicas.tend(self.database, 60, RETRY).stop
        return experience.counts(self.database, self.run_id)

    def count(self, what: str) -> int:
        statement = f"SELECT count(*) AS n FROM tasks WHERE run_id = :run AND {what}"
        return int(one(self.database, statement, run=self.run_id).n)


@pytest.fixture
def training(database: Database, tmp_path: Path) -> Iterator[Training]:
    made = Training(database, FolderStore(tmp_path / "artifacts"))
    yield made
    wrong = "SELECT 1 FROM runs r WHERE r.total <> (SELECT count(*) FROM tasks t WHERE t.run_id = r.id)"
    assert every(database, wrong) == [], "a run's total is the number of its tasks"


def test_a_group_is_complete_by_its_quorum_and_the_rest_is_superseded(training: Training) -> None:
    training.submit(4, quorum=2)
    first, second, *slow = training.begin()
    training.finish(first)
    assert training.record() == ExperienceCounts(open=1)
    training.finish(second)
    assert training.record() == ExperienceCounts(ready=1)
    assert sorted(training.told) == sorted(claim.attempt_id for claim in slow)
    assert training.count("cancel_reason = 'superseded' AND state = 'running'") == 2
    training.fail(*slow, reason=EndReason.SUPERSEDED)
    assert training.record() == ExperienceCounts(ready=1)
    lease = experience.next_batch(training.database, training.run_id, "trainer", groups=8, lease_s=30)
    assert lease is not None
    assert len(lease.keys) == 2


def test_one_that_ends_by_itself_after_the_quorum_is_no_sample(training: Training) -> None:
    training.submit(3, quorum=2)
    *quick, slow = training.begin()
    training.finish(*quick)
    training.record()
    training.finish(slow, reward=0.0)
    assert training.record() == ExperienceCounts(ready=1)
    reasons = every(training.database, "SELECT reason FROM experience_attempts WHERE state = 'nothing'")
    assert [row.reason for row in reasons] == ["not scored: superseded"]
    status = results.run_status(training.database, training.run_id)
    assert (status.scored, status.mean_reward, status.superseded, status.done) == (2, 1.0, 1, True)


def test_what_waits_when_the_quorum_is_there_never_begins(training: Training) -> None:
    training.submit(4, quorum=1)
    (first, *_) = training.begin()
    write(training.database, "UPDATE tasks SET state = 'pending' WHERE id <> :id", id=first.task_id)
    write(training.database, "DELETE FROM leases WHERE attempt_id <> :id", id=first.attempt_id)
    write(
        training.database,
        "UPDATE attempts SET state = 'lost', finished_at = now(), end_reason = 'lost' WHERE id <> :id",
        id=first.attempt_id,
    )
    training.finish(first)
    assert training.record() == ExperienceCounts(ready=1)
    assert training.begin() == []
    assert training.count("state = 'cancelled' AND end_reason = 'superseded'") == 3


def test_the_quorum_of_the_submission_is_the_runs(training: Training) -> None:
    found = training.submit(4, quorum=3)
    kept = one(training.database, "SELECT quorum FROM experience_runs WHERE run_id = :id", id=found.run_id)
    assert kept.quorum == 3
    with pytest.raises(SampleRefused, match="expected quorum 3"):
        experience.open_run(training.database, ExperienceRun(found.run_id, "policy", quorum=2))
    with pytest.raises(SpecInvalid, match="from 1 to 4"):
        training.submit(4, quorum=5)


def test_samples_of_one_group_that_come_at_once_close_it_once(training: Training) -> None:
    training.submit(8, quorum=4)
    training.finish(*training.begin())
    makers = [SampleMaker(training.database, training.store, training.told.extend) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda maker: maker.pass_once(), makers))
    assert training.record() == ExperienceCounts(ready=1)
    assert [kind for kind, _ in facts(training.database)].count("group.ready") == 1


def test_a_lost_replica_is_repaired_alone(training: Training) -> None:
    training.submit(3)
    lost, *others = training.begin()
    training.finish(*others)
    training.lose(lost)
    assert training.record() == ExperienceCounts(open=1)
    (repair,) = training.begin()
    row = one(training.database, "SELECT * FROM tasks WHERE id = :id", id=repair.task_id)
    first = one(training.database, "SELECT * FROM tasks WHERE id = :id", id=lost.task_id)
    assert (row.replica, row.added_for, row.group_id) == (3, "repair", first.group_id)
    own = {"id", "replica", "added_for", "accepted_at", "available_at", "state", "attempts", "faults", "failure"}
    own |= {"end_reason", "finished_at", "in_line"}
    assert {name: value for name, value in row._mapping.items() if name not in own} == {
        name: value for name, value in first._mapping.items() if name not in own
    }
    assert results.run_status(training.database, training.run_id).total == 4
    training.finish(repair)
    assert training.record() == ExperienceCounts(ready=1)


def test_a_replica_is_not_repaired_while_the_others_may_complete_the_group(training: Training) -> None:
    training.submit(4, quorum=3)
    lost, *others = training.begin()
    training.lose(lost)
    assert training.record() == ExperienceCounts(open=1)
    assert training.count("added_for IS NOT NULL") == 0
    training.finish(*others)
    assert training.record() == ExperienceCounts(ready=1)


def test_repairs_end_and_a_group_that_brought_nothing_is_lost_by_name(training: Training) -> None:
    training.submit(2)
    training.lose_all_twice()
    assert training.count("added_for = 'repair'") == 2
    assert training.record() == ExperienceCounts(lost=1)
    detail = one(training.database, "SELECT detail FROM experience_groups").detail
    assert detail == "4 environment_error"
    assert training.begin() == []


def test_a_cancelled_run_gets_nothing_more(training: Training) -> None:
    training.submit(4, quorum=3)
    lost, *others = training.begin()
    training.lose(lost)
    training.record()
    tasks.cancel(training.database, results.task_ids(training.database, training.run_id))
    training.fail(*others, reason=EndReason.CANCELLED)
    assert training.record() == ExperienceCounts(lost=1)
    assert training.count("added_for IS NOT NULL") == 0


def test_the_same_submission_again_finds_the_run_with_its_added_replicas(training: Training) -> None:
    run = training.submit(2, key="once")
    training.lose(training.begin()[0])
    training.record()
    again = training.submit(2, key="once")
    assert (again.existed, again.run_id, again.task_ids) == (True, run.run_id, run.task_ids)
    with pytest.raises(IdempotencyConflict):
        training.submit(3, key="once")


def test_a_replica_of_a_paused_run_waits_as_the_others_do(training: Training) -> None:
    training.submit(2)
    lost, other = training.begin()
    training.lose(lost)
    pauses.pause(training.database, str(training.run_id))
    training.record()
    assert training.begin() == []
    pauses.resume(training.database, str(training.run_id))
    (repair,) = training.begin()
    training.finish(repair, other)
    assert training.record() == ExperienceCounts(ready=1)


def _usual(training: Training, claims: list[Claim]) -> None:
    """These have ended after ten seconds."""
    training.finish(*claims)
    statement = "UPDATE attempts SET claimed_at = finished_at - interval '10 s' WHERE id = ANY(:ids)"
    write(training.database, statement, ids=[claim.attempt_id for claim in claims])


def _late(training: Training, claim: Claim, seconds: float) -> None:
    statement = "UPDATE attempts SET claimed_at = :at WHERE id = :id"
    write(training.database, statement, at=ago(seconds), id=claim.attempt_id)


def test_a_straggler_gets_company_and_the_first_to_end_wins(training: Training) -> None:
    training.submit(4, hedge_after="p90", tasks=3)
    claims = training.begin()
    slow = claims[-1]
    _usual(training, claims[:-1])
    training.record()
    _late(training, slow, 5)
    assert training.tend() == ExperienceCounts(open=1, ready=2)
    assert training.count("added_for IS NOT NULL") == 0, "it is as quick as the others yet"
    _late(training, slow, 11)
    training.tend()
    training.tend()
    assert training.count("added_for = 'hedge'") == 1, "one is enough"
    (hedge,) = training.begin()
    training.tend()
    assert training.count("added_for = 'hedge'") == 1, "it has just begun"
    training.finish(hedge)
    assert training.record() == ExperienceCounts(ready=3)
    assert training.told == [slow.attempt_id]


def test_no_group_is_hedged_while_others_of_it_are_on_time(training: Training) -> None:
    training.submit(4, hedge_after="p90", tasks=4)
    *quick, on_time, slow = training.begin()
    _usual(training, quick)
    training.record()
    _late(training, slow, 600)
    training.tend()
    assert training.count("added_for IS NOT NULL") == 0
    _late(training, on_time, 600)
    training.tend()
    assert training.count("added_for = 'hedge'") == 2, "one for each that is missing"


def test_equal_rewards_close_an_adaptive_group_and_different_ones_extend_it(training: Training) -> None:
    training.submit(Adaptive(2, 6), tasks=2, drop_equal=True)
    a, b, c, d = training.begin()
    training.finish(a, b)
    training.finish(c)
    training.finish(d, reward=0.0)
    assert training.record() == ExperienceCounts(open=1, equal=1)
    more = training.begin()
    assert len(more) == 4
    training.finish(*more)
    assert training.record() == ExperienceCounts(ready=1, equal=1)
    assert results.run_status(training.database, training.run_id).total == 8


def test_a_group_whose_last_replica_is_cancelled_before_it_began_is_closed(training: Training) -> None:
    training.submit(2)
    with training.database.begin() as connection:
        (queue,) = waiting.queues(connection)
        (head,) = waiting.heads(connection, [(queue, 1)])[queue]
        (item,) = admission.admit(connection, [(head.task_id, queue.mode)])
    training.finish(taken(training.database, item.message))
    assert training.record() == ExperienceCounts(open=1)
    tasks.cancel(training.database, results.task_ids(training.database, training.run_id))
    assert training.tend() == ExperienceCounts(ready=1)


def test_the_straggler_may_win_too(training: Training) -> None:
    training.submit(4, hedge_after="p90", tasks=3)
    *quick, slow = training.begin()
    _usual(training, quick)
    training.record()
    _late(training, slow, 60)
    training.tend()
    training.finish(slow)
    assert training.record() == ExperienceCounts(ready=3)
    assert training.count("added_for = 'hedge' AND end_reason = 'superseded'") == 1
