"""What a training loop reads from a real PostgreSQL, and the lock by which there is one of it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from uuid import UUID

import msgpack
import pytest

from app.artifacts.folder import FolderStore
from app.errors import LimitInvalid, SpecInvalid
from app.experience.hand_out import Experience
from app.ledger import experience, training
from app.ledger.database import Database
from app.ledger.experience import ExperienceRun
from app.ledger.training import LoopLock
from app.settings import Settings
from app.training.steps import key_of
from app.training.trainers import own_folder
from tests.building import new_id
from tests.integration.rows import a_run, a_task, kill_sessions, write
from tests.integration.test_experience import CONSUMER, _ended, _leased, _pass, _run, store
from tests.unit.test_training_config import a_config

__all__ = ["store"]


def test_one_process_has_the_loop_of_a_name_through_a_lost_connection(database: Database) -> None:
    mine, other = LoopLock(database, "a"), LoopLock(database, "a")
    mine.hold()
    mine.hold()
    with pytest.raises(LimitInvalid, match="found that another runs"):
        other.hold()
    another = LoopLock(database, "b")
    another.hold()
    another.close()
    kill_sessions(database)
    mine.hold()
    with pytest.raises(LimitInvalid):
        other.hold()
    mine.close()
    other.hold()
    with pytest.raises(LimitInvalid):
        mine.hold()
    other.close()


def test_a_committed_version_that_cannot_be_live_is_reached_by_a_newer_one(database: Database) -> None:
    _run(database)
    experience.settle(database, "policy", "v2", refused="its probe")
    assert [training.reached(database, "policy", one) for one in ("v1", "v2", "v3", "v4")] == [
        "live", "refused", "published", None,
    ]  # fmt: skip
    experience.settle(database, "policy", "v3")
    assert [training.reached(database, "policy", one) for one in ("v1", "v2", "v3")] == ["live"] * 3


def test_a_folder_of_checkpoints_is_of_one_run(database: Database, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    asked = {"kind": "gspo", "model": "a:b", "folder": str(tmp_path / "kept")}
    first, other = (a_config(name=name, trainer=asked) for name in ("first", "other"))
    folder = own_folder(first, settings, database)
    assert folder == own_folder(first, settings, database) == tmp_path / "kept" / "first"
    assert own_folder(other, settings, database) != folder, "two files may name one folder"
    with pytest.raises(SpecInvalid, match=r"found those of .*'a:b'"):
        own_folder(a_config(name="first", trainer=asked | {"model": "c:d"}), settings, database)
    (folder / "step-0").mkdir()
    (folder / "step-1").mkdir()
    with pytest.raises(SpecInvalid, match="found some, though none of its steps has begun here"):
        own_folder(first, settings, database)
    for config in (first, other):
        a_run(database, user="default", name="step", idempotency_key=key_of(config, 0))
    own_folder(first, settings, database)
    with pytest.raises(SpecInvalid, match="found none, though its steps have begun"):
        own_folder(other, settings, database)


def _finished(database: Database, task: UUID) -> None:
    verdict = "(SELECT a.verdict FROM attempts a WHERE a.task_id = tasks.id)"
    write(database, f"UPDATE tasks SET finished_at = clock_timestamp(), verdict = {verdict} WHERE id = :id", id=task)


def test_a_group_goes_on_until_its_samples_are_on_record_or_nothing_can_come(
    database: Database, store: FolderStore
) -> None:
    run_id, group = _run(database), new_id()
    task = _ended(database, store, run_id, group)
    assert training.groups_going(database, run_id) == 1, "it has not ended"
    _finished(database, task)
    assert training.groups_going(database, run_id) == 1, "its samples are not made yet"
    _pass(database, store)
    assert training.groups_going(database, run_id) == 0
    waiting = a_task(database, run_id)
    assert training.groups_going(database, run_id) == 1
    write(database, "UPDATE tasks SET state = 'cancelled', finished_at = clock_timestamp() WHERE id = :id", id=waiting)
    assert training.groups_going(database, run_id) == 0, "cancelled before its first attempt"
    lost = _ended(database, store, run_id, new_id(), reward=None, state="failed")
    _finished(database, lost)
    _pass(database, store)
    assert training.groups_going(database, run_id) == 1, "it is repaired by another replica"
    write(database, "UPDATE tasks SET state = 'cancelled', finished_at = now() WHERE added_for = 'repair'")
    assert training.groups_going(database, run_id) == 0


def test_the_example_for_prime_rl_writes_a_step_and_commits_it(
    database: Database, store: FolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "training"))
    step, example = import_module("step"), import_module("with_prime_rl")
    run_id = _run(database)
    for _ in range(2):
        _finished(database, _ended(database, store, run_id, new_id()))
    _pass(database, store)
    handed = Experience(database, store, ExperienceRun(run_id, "policy"), consumer=CONSUMER)
    whole = step.Step(handed, 2, wait_s=1)
    example.write(whole, tmp_path / "step-0.msgpack")
    written = msgpack.unpackb((tmp_path / "step-0.msgpack").read_bytes())
    assert [(one[0], one[4], len(one)) for one in written] == [([1, 2, 7, 8], "fix-it", 13)] * 2
    whole.commit("v9")
    assert (handed.counts().committed, training.committed_version(database, run_id)) == (2, "v9")


def test_the_figures_of_a_step_are_of_what_is_handed_out(database: Database, store: FolderStore) -> None:
    run_id, group = _run(database), new_id()
    for first, place in ((1.0, group), (-0.5, new_id()), (None, new_id())):
        for reward in (first, 0.0) if place == group else (first,):
            state = "failed" if reward is None else "succeeded"
            _finished(database, _ended(database, store, run_id, place, reward=reward, state=state, version="v1"))
        _pass(database, store)  # one group after the other: within a pass, threads decide which is complete first
    none = training.figures(database, run_id)
    assert (none.used, none.tokens, none.waste) == (0, 0, 1.0)
    so_far = training.figures(database, run_id, so_far=True)
    assert (so_far.used, so_far.tokens, so_far.attempts) == (3, 6, 4), "what is complete, of what is decided"
    a_task(database, run_id)
    assert training.figures(database, run_id, so_far=True) == so_far
    lease = _leased(database, run_id)
    assert lease.groups == (group,)
    experience.commit(database, lease.id, "v2")
    experience.settle(database, "policy", "v3")
    found = training.figures(database, run_id)
    assert (found.scored, found.attempts, found.used, found.tokens) == (3, 4, 2, 4)
    assert found.reward == pytest.approx(0.5 / 3)
    assert found.solved == pytest.approx(1 / 3)
    assert found.waste == 0.5
    assert found.staleness == 0, "v3 went live after the group was complete"
    assert training.committed_version(database, run_id) == "v2"
    assert training.version_state(database, "policy", "v3") == "live"
    assert training.version_state(database, "policy", "v9") is None
