"""`megaflow record`, `replay` and `compare` as a person uses them, over a real ledger and a real store."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import pytest

from app.artifacts import open_store
from app.errors import SpecInvalid, WaitTimeout
from app.ledger import accept, attempts, ends, results
from app.ledger.accept import NewRun
from app.ledger.database import Database
from app.models.endings import EndReason
from app.models.outcome import Artifact, ArtifactKind, TestStatus, Verdict
from app.models.spec import Mode, ModelChoice, TaskSpec
from app.settings import Settings
from tests.building import a_spec, a_task, dispatched, ready_instance
from tests.integration.command import CommandLine

PATCH = b"--- a/x\n+++ b/x\n"


def specs() -> list[TaskSpec]:
    model = ModelChoice(name="big-one", api_key_env="A_KEY")
    return [
        TaskSpec(task=a_task(name), agent="mini-swe-agent", model=model, mode=Mode.PERSISTENT)
        for name in ("first", "second")
    ]


def a_run(database: Database, new: Sequence[TaskSpec] | None = None, replicas: int = 2) -> UUID:
    return accept.accept(
        database, NewRun(specs=new or specs(), replicas=replicas, name="night", user_name="ann")
    ).run_id


def finish(database: Database, settings: Settings, run_id: UUID, *, patch: bytes = PATCH, reward: float = 1.0) -> None:
    """End all tasks of a run as a worker does."""
    store = open_store(settings.artifacts())
    ids = tuple(results.task_ids(database, run_id))
    instance = ready_instance(database)
    for item in dispatched(database, accept.Accepted(run_id, ids), Mode.PERSISTENT):
        claim = attempts.claim(database, item.message, instance, lease_s=30)
        assert claim is not None

        def kept(kind: ArtifactKind, content: bytes, at: UUID = claim.attempt_id) -> Artifact:
            key = f"runs/{run_id}/{at}/{kind}"
            digest = hashlib.sha256(content).hexdigest()
            return Artifact(kind=kind, key=key, url=store.put(key, content), size_bytes=len(content), sha256=digest)

        verdict = Verdict(reward=reward, counts=True, tests={"t": TestStatus.PASSED})
        calls = kept(ArtifactKind.MODEL_CALLS, f"calls of {claim.attempt_id}".encode())
        ends.finish(
            database,
            claim,
            end_reason=EndReason.SUBMITTED,
            verdict=verdict,
            artifacts=[kept(ArtifactKind.PATCH, patch), calls],
        )


def test_recording_writes_one_file_for_each_attempt(
    database: Database, settings: Settings, megaflow: CommandLine
) -> None:
    run_id = a_run(database)
    finish(database, settings, run_id)
    assert "4 attempts recorded" in megaflow.run("record", "night").stdout
    folder = settings.recordings / str(run_id)
    names = [f"{task}--{replica}--mini-swe-agent.jsonl.zst" for task in ("first", "second") for replica in (0, 1)]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert (folder / names[0]).read_bytes().startswith(b"calls of ")


def test_a_run_without_model_calls_is_refused(database: Database, settings: Settings, megaflow: CommandLine) -> None:
    accept.accept(database, NewRun(specs=[a_spec()], name="early"))
    with pytest.raises(SpecInvalid, match="no attempt has ended"):
        megaflow.run("record", "early")
    assert not settings.recordings.exists()


def replayed(database: Database, settings: Settings, megaflow: CommandLine) -> tuple[UUID, UUID]:
    """A run that has ended, and the run that plays it, accepted."""
    run_id = a_run(database)
    finish(database, settings, run_id)
    told = megaflow.run("replay", run_id, "--no-wait").stdout
    assert "4 tasks accepted" in told
    (again,) = [status.id for status in results.runs(database) if status.name == "night-replay"]
    return run_id, again


def test_the_same_tasks_are_submitted_with_the_recording_as_their_model(
    database: Database, settings: Settings, megaflow: CommandLine
) -> None:
    run_id, again = replayed(database, settings, megaflow)
    before, after = (results.results(database, results.task_ids(database, one)) for one in (run_id, again))
    assert [(one.name, one.replica, one.agent) for one in after] == [
        (one.name, one.replica, one.agent) for one in before
    ]
    new = results.task_spec(database, after[0].task_id)
    old = results.task_spec(database, before[0].task_id)
    assert new.model == ModelChoice(name=f"replay:{run_id}")
    assert (new.task, new.mode, new.resource_class) == (old.task, old.mode, old.resource_class)
    assert results.run_status(database, again).user_name == "ann"


def test_waiting_for_the_end_compares_at_once(database: Database, settings: Settings, megaflow: CommandLine) -> None:
    run_id = a_run(database)
    finish(database, settings, run_id)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(megaflow.run, "replay", run_id, "--timeout", 60)
        until = time.monotonic() + 60
        while not (again := [one.id for one in results.runs(database) if one.name == "night-replay"]):
            assert not waiting.done(), waiting.result().output
            assert time.monotonic() < until
        finish(database, settings, again[0], patch=b"another")
        done = waiting.result(60)
    assert (done.exit_code, "0 of 4 tasks are the same" in done.stdout) == (1, True)


def test_a_run_that_went_the_same_way_compares_equal(
    database: Database, settings: Settings, megaflow: CommandLine
) -> None:
    run_id, again = replayed(database, settings, megaflow)
    with pytest.raises(WaitTimeout, match="has not ended"):
        megaflow.run("compare", run_id, again)
    finish(database, settings, again)
    done = megaflow.run("compare", run_id, again)
    assert (done.exit_code, "4 of 4 tasks are the same" in done.stdout) == (0, True)


@pytest.mark.parametrize(("other", "differs"), [({"patch": b"another"}, ["patch"]), ({"reward": 0.0}, ["reward"])])
def test_a_difference_is_shown_and_told_by_the_exit_code(
    database: Database, settings: Settings, megaflow: CommandLine, other: dict[str, Any], differs: list[str]
) -> None:
    run_id, again = replayed(database, settings, megaflow)
    finish(database, settings, again, **other)
    assert megaflow.run("compare", run_id, again).exit_code == 1
    done = megaflow.run("compare", run_id, again, "--json")
    assert done.exit_code == 1
    assert [pair["differs"] for pair in json.loads(done.stdout)] == [differs] * 4


def test_runs_of_different_tasks_are_not_compared(
    database: Database, settings: Settings, megaflow: CommandLine
) -> None:
    one, two = a_run(database), a_run(database, replicas=1)
    for run_id in (one, two):
        finish(database, settings, run_id)
    with pytest.raises(SpecInvalid, match="same tasks"):
        megaflow.run("compare", one, two)
