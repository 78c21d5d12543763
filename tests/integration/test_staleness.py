"""A training run does not begin more groups than its trainer will take in time, against a real PostgreSQL."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.artifacts.folder import FolderStore
from app.ledger import experience
from app.ledger.database import Database
from app.ledger.experience import ExperienceCounts
from app.scheduling.dispatcher import Dispatcher
from app.settings import Settings
from tests.building import ready_instance
from tests.integration.command import CommandLine
from tests.integration.test_fairness_and_pools import bindings
from tests.integration.test_replicas import Training
from tests.integration.test_scheduling import dispatcher, world
from tests.services import MakeSettings

__all__ = ["dispatcher", "world"]


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings(persistent_instances=0, retry_base_s=0.0)


@pytest.fixture
def training(database: Database, tmp_path: Path) -> Training:
    """Five groups of two replicas; the samples of one batch more than the next may be ahead."""
    for _ in range(10):
        ready_instance(database)
    made = Training(database, FolderStore(tmp_path / "artifacts"))
    made.submit(2, tasks=5, max_staleness=1)
    return made


def take(training: Training, groups: int = 1) -> experience.Lease | None:
    return experience.next_batch(training.database, training.run_id, "trainer", groups=groups, lease_s=60)


def begun(dispatcher: Dispatcher, training: Training) -> int:
    """Tasks that were admitted in all."""
    while dispatcher.pass_once():
        pass
    return training.count("attempts > 0")


def test_groups_begin_as_the_trainer_takes_them(
    dispatcher: Dispatcher, training: Training, megaflow: CommandLine
) -> None:
    assert take(training) is None
    assert begun(dispatcher, training) == 4, "two groups: the next batch and one ahead"
    limit = f"quota:run:{training.run_id}:policy"
    assert bindings(training.database) == {(limit, "default")}
    shown = megaflow("explain", str(training.run_id))
    assert f"{limit} 2 of 2" in shown
    assert "6 task(s) wait for a new policy" in shown
    (now,) = megaflow.json("explain", str(training.run_id))["now"]
    assert [factor["limit"] for factor in now["bounds"]] == [limit]

    training.finish(*training.claims())
    assert training.record() == ExperienceCounts(ready=2)
    assert begun(dispatcher, training) == 4, "they are not trained on yet"
    lease = take(training)
    assert lease is not None
    assert begun(dispatcher, training) == 4
    experience.publish(training.database, "policy", "v2")
    experience.settle(training.database, "policy", "v2")
    experience.commit(training.database, lease.id, "v2")
    assert begun(dispatcher, training) == 6, "one more group"


def test_one_that_gathers_a_step_by_small_batches_is_not_held_up(dispatcher: Dispatcher, training: Training) -> None:
    take(training)
    for _ in range(4):
        begun(dispatcher, training)
        training.finish(*training.claims())
        training.record()
        take(training)
    assert begun(dispatcher, training) == 10


def test_what_a_begun_group_needs_still_goes(dispatcher: Dispatcher, training: Training) -> None:
    take(training)
    begun(dispatcher, training)
    lost, *others = training.claims()
    training.fail(lost)
    before = training.count("attempts > 1")
    begun(dispatcher, training)
    assert (before, training.count("attempts > 1")) == (0, 1), "its next attempt"
    training.fail(*training.claims())
    training.record()
    assert training.count("added_for = 'repair'") == 1
    assert begun(dispatcher, training) == 5
    training.finish(*others, *training.claims())
    assert training.record() == ExperienceCounts(ready=2)


def test_groups_that_were_set_aside_make_room(dispatcher: Dispatcher, training: Training) -> None:
    take(training)
    begun(dispatcher, training)
    training.finish(*training.claims())
    training.record()
    for version in ("v2", "v3"):
        experience.publish(training.database, "policy", version)
        experience.settle(training.database, "policy", version)
    assert take(training) is None, "two versions behind"
    assert experience.counts(training.database, training.run_id) == ExperienceCounts(stale=2)
    assert begun(dispatcher, training) == 8


def test_a_run_without_the_bound_is_not_held(dispatcher: Dispatcher, database: Database, tmp_path: Path) -> None:
    for _ in range(10):
        ready_instance(database)
    free = Training(database, FolderStore(tmp_path / "artifacts"))
    free.submit(2, tasks=5)
    take(free)
    assert begun(dispatcher, free) == 10
    free.submit(2, tasks=5, max_staleness=0)
    assert begun(dispatcher, free) == 10, "its trainer has not said how much it takes"
