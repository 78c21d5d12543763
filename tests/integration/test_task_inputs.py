"""What an earlier task left is put into a later one's environment, or that one ends and says why not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.client import Handle, MegaFlow
from app.evaluation import demo_tasks
from app.models.endings import EndReason
from app.models.outcome import Artifact, ArtifactKind
from app.models.spec import AgentTask, EnvironmentKind
from app.settings import Settings
from app.workers import services
from app.workers.attempt import carry_out
from app.workers.attempt_context import AttemptContext
from app.workers.environments import environment_for, put_inputs
from app.workers.lease import StopToken
from app.workers.services import WorkerServices
from tests.integration.rows import one
from tests.integration.test_task_graphs import a_pass, begin, succeed

_PATCH = b"diff --git a/x b/x\n\xff\0\n"
_KEY = "runs/first/patch"
_STORED = Artifact(kind=ArtifactKind.PATCH, key=_KEY)


@pytest.fixture
def here(settings: Settings) -> Iterator[WorkerServices]:
    built = services.build(settings, pooled=True, max_idle=0)
    yield built
    built.close()


@pytest.fixture
def flow(settings: Settings) -> Iterator[MegaFlow]:
    with MegaFlow(settings) as opened:
        yield opened


def _task(settings: Settings) -> AgentTask:
    return next(task for task in demo_tasks(settings, EnvironmentKind.LOCAL) if task.name == "order-ledger")


def _later(flow: MegaFlow, path: Path, *artifacts: Artifact) -> Handle:
    """A task that gets the patch of one which left these artifacts."""
    first = flow.enqueue(_task(flow.settings), agent="nop")
    then = flow.enqueue(_task(flow.settings), agent="nop", inputs={str(path): first.artifact("patch")})
    assert a_pass(flow.database) == [first.task_id]
    succeed(flow.database, begin(flow.database, first.task_id), artifacts)
    assert a_pass(flow.database) == [then.task_id]
    return then


def _carried_out(flow: MegaFlow, here: WorkerServices, later: Handle) -> tuple[EndReason, Any]:
    reason = carry_out(begin(flow.database, later.task_id), here, StopToken())
    row = one(
        flow.database,
        "SELECT t.state, a.failure FROM tasks t JOIN attempts a ON a.task_id = t.id WHERE t.id = :id",
        id=later.task_id,
    )
    return reason, row


def test_the_artifact_is_a_file_in_the_environment(flow: MegaFlow, here: WorkerServices, tmp_path: Path) -> None:
    here.store.put(_KEY, _PATCH)
    claim = begin(flow.database, _later(flow, Path("/inputs/first.diff"), _STORED).task_id)
    context = AttemptContext.of(claim, here, StopToken(), tmp_path)
    with environment_for(context, "agent") as environment:
        put_inputs(context, environment)
        assert environment.get("/inputs/first.diff") == _PATCH


@pytest.mark.parametrize(
    ("artifacts", "why"),
    [
        ((), "that task left none"),
        ((Artifact(kind=ArtifactKind.PATCH, missing="the task has no repository"),), "the task has no repository"),
        ((_STORED,), "found nothing at"),
    ],
)
def test_what_is_not_there_ends_the_task_at_the_first(
    flow: MegaFlow, here: WorkerServices, tmp_path: Path, artifacts: tuple[Artifact, ...], why: str
) -> None:
    reason, row = _carried_out(flow, here, _later(flow, tmp_path / "in", *artifacts))
    assert (reason, row.state, row.failure["error"]) == (EndReason.INVALID_SPEC, "failed", "InputMissing")
    assert row.failure["message"].startswith("input missing: patch of task order-ledger (")
    assert why in row.failure["message"]


def test_a_store_that_does_not_answer_costs_an_attempt_and_no_more(
    flow: MegaFlow, here: WorkerServices, tmp_path: Path
) -> None:
    url = Path(here.store.put(_KEY, _PATCH).removeprefix("file://"))
    url.unlink()
    url.symlink_to(url)  # every look at it is an error of the file system
    reason, row = _carried_out(flow, here, _later(flow, tmp_path / "in", _STORED))
    assert (reason, row.state) == (EndReason.INFRASTRUCTURE, "pending")
    assert row.failure["error"] == "ArtifactStoreUnavailable"
