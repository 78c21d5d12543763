"""Training samples against a real PostgreSQL: from ended attempts to groups, each handed out and committed once."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from app.artifacts.folder import FolderStore
from app.errors import SampleRefused, UnknownName
from app.experience import files
from app.experience.hand_out import Experience
from app.experience.maker import SampleMaker
from app.ledger import experience
from app.ledger.database import Database
from app.ledger.dropped import unused
from app.ledger.experience import ExperienceCounts, ExperienceRun
from app.model_service.trajectory import artifact
from tests.building import new_id
from tests.integration.rows import a_task, an_attempt, insert, one, write
from tests.unit.test_trajectory import a_conversation

CONSUMER = "trainer-1"


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "artifacts")


def _run(database: Database, **options: Any) -> UUID:
    run_id = new_id()
    insert(database, "runs", id=run_id, name="train", user_name="alice", purpose="training", total=4)
    experience.open_run(database, ExperienceRun(run_id, "policy", **options))
    for version in ("v1", "v2", "v3"):
        experience.publish(database, "policy", version)
    experience.settle(database, "policy", "v1")
    return run_id


def _ended(
    database: Database,
    store: FolderStore,
    run_id: UUID,
    group: UUID,
    *,
    reward: float | None = 1.0,
    version: str = "v1",
    state: str = "succeeded",
    **attempt: Any,
) -> UUID:
    """An ended task with recorded calls; its id."""
    verdict = None if reward is None else {"reward": reward, "counts": True, "metrics": {"tests": 0.5}}
    reason = "submitted" if verdict else "lost"
    told = {"state": state, "attempts": 1, "faults": 3 * (verdict is None), "end_reason": reason}
    task = a_task(database, run_id, group_id=group, agent="mini-swe-agent", **told)
    extra = {"verdict": verdict} if verdict else {}
    ended = "finished" if verdict else "lost"
    attempt_id = an_attempt(database, task, state=ended, end_reason=reason, **extra, **attempt)
    (call,) = a_conversation("a")
    call = replace(call, prompt_token_ids=(1, 2), token_ids=(7, 8), logprobs=(-0.5, -0.25), policy_version=version)
    key = f"runs/{run_id}/{task}/1/model_calls.jsonl.zst"
    store.put(key, artifact.export([call]))
    insert(database, "artifacts", attempt_id=attempt_id, kind="model_calls", key=key)
    return task


def _pass(database: Database, store: FolderStore) -> int:
    return SampleMaker(database, store, lambda _: None).pass_once()


def _complete(database: Database, store: FolderStore, *versions: str, **options: Any) -> UUID:
    """A run with a complete group of one sample by each of these versions."""
    run_id = _run(database, **options)
    for version in versions or ("v1",):
        _ended(database, store, run_id, new_id(), version=version)
    _pass(database, store)
    return run_id


def _leased(database: Database, run_id: UUID, groups: int = 1, **options: Any) -> experience.Lease:
    lease = experience.next_batch(database, run_id, CONSUMER, **{"groups": groups, "lease_s": 30} | options)
    assert lease is not None
    return lease


def test_a_complete_group_is_handed_out_and_committed_once(database: Database, store: FolderStore) -> None:
    run_id, group = _run(database), new_id()
    for reward in (1.0, 0.0):
        _ended(database, store, run_id, group, reward=reward)
    assert _pass(database, store) == 2
    assert _pass(database, store) == 0, "nothing is made twice"
    lease = _leased(database, run_id, 8)
    assert lease.groups == (group,)
    rows = [row for key in lease.keys for row in files.read(store.get(key))]
    assert sorted(row["reward"] for row in rows) == [0.0, 1.0]
    assert {tuple(row["token_ids"]) for row in rows} == {(1, 2, 7, 8)}
    assert {row["group_id"] for row in rows} == {str(group)}
    assert experience.next_batch(database, run_id, CONSUMER, groups=8, lease_s=30) is None
    experience.commit(database, lease.id, "v2")
    experience.commit(database, lease.id, "v2")
    with pytest.raises(SampleRefused, match="committed with version 'v2'"):
        experience.commit(database, lease.id, "v3")
    assert experience.counts(database, run_id) == ExperienceCounts(committed=1)


def test_a_lapsed_lease_is_offered_again_and_its_late_commit_refused(database: Database, store: FolderStore) -> None:
    run_id = _complete(database, store)
    late, again = _leased(database, run_id, lease_s=0), _leased(database, run_id)
    assert again.groups == late.groups
    with pytest.raises(SampleRefused, match="lapsed"):
        experience.commit(database, late.id, "v2")
    experience.settle(database, "policy", "v3", refused="its probe")
    with pytest.raises(SampleRefused, match="'v3' of policy was refused"):
        experience.commit(database, again.id, "v3")
    with pytest.raises(SampleRefused, match="lapsed"):
        experience.renew(database, late.id, lease_s=30)
    experience.commit(database, again.id, "v2")
    assert one(database, "SELECT id FROM experience_leases WHERE state = 'committed'").id == again.id


def test_a_lost_or_damaged_file_sets_its_group_aside_and_the_others_are_handed_out(
    database: Database, store: FolderStore
) -> None:
    run_id = _run(database)
    gone, damaged, _ = [_ended(database, store, run_id, new_id()) for _ in range(3)]
    _pass(database, store)
    store.put(f"runs/{run_id}/{damaged}/1/samples.parquet", b"PAR1")
    store._path(f"runs/{run_id}/{gone}/1/samples.parquet").unlink()
    handed = Experience(database, store, ExperienceRun(run_id, "policy"), consumer=CONSUMER)
    batch = handed.next_batch(8)
    assert batch is not None
    assert (len(batch.groups()), handed.groups_left) == (1, 1)
    assert experience.counts(database, run_id) == ExperienceCounts(lost=2, leased=1)
    detail = one(database, "SELECT min(detail) AS said FROM experience_groups WHERE state = 'lost'").said
    assert "samples.parquet: expected" in detail
    handed.commit(batch, "v2")
    assert (handed.next_batch(8), handed.groups_left) == (None, 0)


def test_a_group_waits_for_all_or_its_quorum(database: Database, store: FolderStore) -> None:
    run_id, group = _run(database), new_id()
    _ended(database, store, run_id, group)
    a_task(database, run_id, group_id=group)
    _pass(database, store)
    assert experience.counts(database, run_id) == ExperienceCounts(open=1)
    quorum = _run(database, quorum=2)
    other = new_id()
    a_task(database, quorum, group_id=other)
    for _ in range(2):
        _ended(database, store, quorum, other)
        _pass(database, store)
    assert experience.counts(database, quorum) == ExperienceCounts(ready=1)


def test_a_replica_lost_to_infrastructure_does_not_drop_its_group(database: Database, store: FolderStore) -> None:
    run_id, group = _run(database), new_id()
    lost = _ended(database, store, run_id, group, reward=None, state="failed")
    _pass(database, store)
    assert experience.counts(database, run_id) == ExperienceCounts(open=1), "it is repaired"
    write(database, "UPDATE tasks SET state = 'pending' WHERE id = :id", id=lost)
    _ended(database, store, run_id, group)
    _pass(database, store)
    assert experience.counts(database, run_id) == ExperienceCounts(open=1), "its repair is under way"
    state = one(database, "SELECT state, reason FROM experience_attempts WHERE task_id = :id", id=lost)
    assert (state.state, state.reason) == ("nothing", "not scored: lost")


def test_groups_of_equal_rewards_are_set_aside_on_request(database: Database, store: FolderStore) -> None:
    run_id = _run(database, drop_equal=True)
    equal, mixed = new_id(), new_id()
    for group, reward in ((equal, 1.0), (equal, 1.0), (mixed, 1.0), (mixed, 0.0)):
        _ended(database, store, run_id, group, reward=reward)
    _pass(database, store)
    assert experience.counts(database, run_id) == ExperienceCounts(ready=1, equal=1)


def test_a_group_older_than_the_bound_is_set_aside_at_hand_out(database: Database, store: FolderStore) -> None:
    run_id = _complete(database, store, "v1", "v2", "unheard-of")
    experience.settle(database, "policy", "v2")
    experience.settle(database, "policy", "v3")
    assert len(_leased(database, run_id, 8, max_staleness=1).groups) == 1
    assert experience.counts(database, run_id) == ExperienceCounts(leased=1, stale=2)


def test_a_group_of_an_unknown_version_is_set_aside_without_a_bound_and_named(
    database: Database, store: FolderStore
) -> None:
    run_id = _complete(database, store, "unheard-of")
    assert experience.next_batch(database, run_id, CONSUMER, groups=8, lease_s=30) is None
    assert experience.counts(database, run_id) == ExperienceCounts(stale=1)
    named = "written by versions of policy that are not on record: 'unheard-of'"
    assert one(database, "SELECT reason FROM experience_attempts").reason == named
    assert unused(database, run_id) == {named: 1}


@pytest.mark.parametrize("bound", [None, 0])
def test_a_policy_without_a_live_version_is_refused_by_name(
    database: Database, store: FolderStore, bound: int | None
) -> None:
    run_id, group = new_id(), new_id()
    insert(database, "runs", id=run_id, name="train", user_name="alice", purpose="training", total=1)
    experience.open_run(database, ExperienceRun(run_id, "policy", max_staleness=bound))
    experience.publish(database, "policy", "v1")
    _ended(database, store, run_id, group, version="v1")
    _pass(database, store)
    with pytest.raises(SampleRefused, match="expected a live version of 'policy', found none"):
        experience.next_batch(database, run_id, CONSUMER, groups=1, lease_s=30)
    experience.settle(database, "policy", "v1")
    assert _leased(database, run_id).groups == (group,)


def test_a_version_unpublished_or_before_the_live_one_commits_nothing(database: Database, store: FolderStore) -> None:
    run_id = _complete(database, store)
    lease = _leased(database, run_id)
    with pytest.raises(UnknownName, match="publish it"):
        experience.commit(database, lease.id, "v9")
    experience.settle(database, "policy", "v3")
    with pytest.raises(SampleRefused, match="found 'v2', number 1: versions do not go back"):
        experience.commit(database, lease.id, "v2")
    assert experience.counts(database, run_id) == ExperienceCounts(leased=1)
    experience.commit(database, lease.id, "v3")


def test_a_batch_may_not_be_staler_than_its_run_allows(database: Database, store: FolderStore) -> None:
    run_id = _complete(database, store, max_staleness=1)
    with pytest.raises(SampleRefused, match="max_staleness of at most 1, which is the run's, found 2"):
        experience.next_batch(database, run_id, CONSUMER, groups=1, lease_s=30, max_staleness=2)
    _leased(database, run_id, max_staleness=1)


def test_versions_do_not_go_back_and_a_refused_one_stays_refused(database: Database) -> None:
    _run(database)
    experience.settle(database, "policy", "v2")
    for goes_back in (experience.settle, experience.publish):
        with pytest.raises(SampleRefused, match="found 'v1', number 0: versions do not go back"):
            goes_back(database, "policy", "v1")
    assert experience.publish(database, "policy", "v2") == 1, "the live one may be said again"
    experience.settle(database, "policy", "v3", refused="its probe differs by 0.5")
    with pytest.raises(SampleRefused, match="refused before"):
        experience.publish(database, "policy", "v3")
    for name in (" ", "v\x01", "v" * 201):
        with pytest.raises(SampleRefused, match="characters that can be shown"):
            experience.publish(database, "policy", name)


@pytest.mark.parametrize(("scripted", "reason"), [(True, "answered by a script"), (False, "")])
def test_scripted_answers_teach_nothing(database: Database, store: FolderStore, scripted: bool, reason: str) -> None:
    task = _ended(database, store, _run(database), new_id(), scripted=scripted)
    _pass(database, store)
    assert one(database, "SELECT reason FROM experience_attempts WHERE task_id = :id", id=task).reason == reason


@pytest.mark.parametrize("groups", [0, -1, 1.5, "x", None, True])
def test_what_is_no_number_of_groups_is_refused(database: Database, store: FolderStore, groups: Any) -> None:
    handed_out = Experience(database, store, ExperienceRun(_run(database), "policy"), consumer=CONSUMER)
    with pytest.raises(SampleRefused, match="number of groups"):
        handed_out.next_batch(groups)
    with pytest.raises(SampleRefused, match="seconds to wait of at least 0, found nan"):
        handed_out.next_batch(1, wait_s=float("nan"))


def test_a_run_that_is_opened_again_with_other_options_is_refused(database: Database) -> None:
    run_id = _run(database, quorum=2)
    experience.open_run(database, ExperienceRun(run_id, "policy", quorum=2))
    with pytest.raises(SampleRefused, match=r"expected quorum 2, .* found 3"):
        experience.open_run(database, ExperienceRun(run_id, "policy", quorum=3))
    with pytest.raises(SampleRefused, match=r"expected policy policy, .* found other"):
        experience.open_run(database, ExperienceRun(run_id, "other", quorum=2))


def test_a_run_that_is_no_training_feeds_no_trainer(database: Database) -> None:
    run_id = new_id()
    insert(database, "runs", id=run_id, name="eval", user_name="alice", purpose="evaluation", total=1)
    with pytest.raises(SampleRefused, match="purpose `training`"):
        experience.open_run(database, ExperienceRun(run_id, "policy"))


_CONSUMER = """
import sys, uuid
from app.ledger import experience
from app.ledger.database import Database
database, run = Database(sys.argv[1]), uuid.UUID(sys.argv[2])
while (lease := experience.next_batch(database, run, "trainer-1", groups=3, lease_s=0.2)) is not None:
    print(lease.id, flush=True)
    experience.commit(database, lease.id, "v2")
"""


def test_consumers_killed_at_any_moment_commit_every_group_once(database: Database, store: FolderStore) -> None:
    run_id = _complete(database, store, *["v1"] * 24)
    command = [sys.executable, "-c", _CONSUMER, database.url, str(run_id)]
    for victims in range(200):
        consumer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert consumer.stdout is not None
        if victims < 6:
            for _ in range(victims % 3):
                consumer.stdout.readline()
            consumer.send_signal(signal.SIGKILL)
        consumer.communicate(timeout=60)
        if experience.counts(database, run_id).committed == 24:
            break
    assert experience.counts(database, run_id) == ExperienceCounts(committed=24)
    lapsed = "SELECT FROM experience_leases l JOIN experience_groups g ON g.lease_id = l.id WHERE l.state = 'lapsed'"
    assert database.sql(lapsed).all() == []


def test_a_version_before_a_committed_one_commits_nothing_though_neither_is_live(
    database: Database, store: FolderStore
) -> None:
    run_id = _complete(database, store, "v1", "v1")
    first, second = _leased(database, run_id), _leased(database, run_id)
    experience.commit(database, first.id, "v3")
    with pytest.raises(SampleRefused, match="after number 2, which was committed; found 'v2', number 1"):
        experience.commit(database, second.id, "v2")
    assert experience.counts(database, run_id) == ExperienceCounts(leased=1, committed=1)
    experience.commit(database, second.id, "v3")
