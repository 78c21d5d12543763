"""`megaflow record` as a person uses it, over a real ledger and a real store."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from uuid import UUID

import pytest

from app.artifacts import open_store
from app.errors import SpecInvalid
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
    folder = settings.recordings / str(run_id)
    assert megaflow.json("record", "night") == {"run_id": str(run_id), "folder": str(folder), "written": 4}
    names = [f"{task}--{replica}--mini-swe-agent.jsonl.zst" for task in ("first", "second") for replica in (0, 1)]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert (folder / names[0]).read_bytes().startswith(b"calls of ")


def test_a_run_without_model_calls_is_refused(database: Database, settings: Settings, megaflow: CommandLine) -> None:
    accept.accept(database, NewRun(specs=[a_spec()], name="early"))
    with pytest.raises(SpecInvalid, match="no attempt has ended"):
        megaflow.run("record", "early")
    assert not settings.recordings.exists()
