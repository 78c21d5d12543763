"""Small real objects for tests: tasks, specs, instances in the ledger."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from uuid_utils import compat as uuids

from app.ledger import accept, admission, attempts, ends, instances
from app.ledger.accept import Accepted, NewRun
from app.ledger.admission import QueuedMessage
from app.ledger.attempts import Claim
from app.ledger.database import Database
from app.ledger.instances import InstanceDemand
from app.models.endings import EndReason, RetryPolicy
from app.models.instance import InstanceMode
from app.models.model_calls import ModelSession
from app.models.outcome import Failure, TaskResult, WakeUpMessage
from app.models.spec import (
    AgentTask,
    Bundle,
    EnvironmentSpec,
    Limits,
    Mode,
    ModelChoice,
    ScriptGoal,
    TaskSpec,
)
from app.models.states import TaskState

RETRY = RetryPolicy(base_s=0.0, cap_s=0.0)


def a_task(name: str = "example-1", *, max_attempts: int = 3) -> AgentTask:
    """A task that needs nothing to exist: good for the ledger, not for running."""
    return AgentTask(
        name=name,
        description="do it",
        environment=EnvironmentSpec(image="example"),
        goal=ScriptGoal(tests=Bundle(sha256="0" * 64, size_bytes=0)),
        limits=Limits(max_attempts=max_attempts),
    )


def a_result(**about: Any) -> TaskResult:
    """A task that has succeeded, with what else is said of it."""
    ids = {"task_id": new_id(), "run_id": new_id()}
    alike = {"name": "example-1", "agent": "oracle", "mode": Mode.EPHEMERAL, "state": TaskState.SUCCEEDED}
    return TaskResult.model_validate(ids | alike | about)


def a_spec(name: str = "example-1", *, mode: Mode = Mode.PERSISTENT, max_attempts: int = 3) -> TaskSpec:
    return TaskSpec(task=a_task(name, max_attempts=max_attempts), agent="nop", mode=mode)


def accepted(database: Database, count: int = 1, *, mode: Mode = Mode.PERSISTENT, max_attempts: int = 3) -> Accepted:
    specs = [a_spec(f"example-{n}", mode=mode, max_attempts=max_attempts) for n in range(count)]
    return accept.accept(database, NewRun(specs=specs))


def dispatched(database: Database, run: Accepted, mode: Mode = Mode.PERSISTENT) -> list[QueuedMessage]:
    """Admit every task of the run."""
    with database.begin() as connection:
        return admission.admit(connection, [(task_id, mode) for task_id in run.task_ids])


def ready_instance(database: Database, mode: Mode | InstanceMode = Mode.PERSISTENT) -> UUID:
    wanted = InstanceDemand("process", mode, "standard", 1 if mode == Mode.EPHEMERAL else 4, 1, None)
    with database.begin() as connection:
        (instance_id,) = instances.request(connection, wanted)
    assert instances.ready(database, instance_id)
    return instance_id


def claimed(database: Database, mode: Mode = Mode.PERSISTENT, *, max_attempts: int = 3) -> Claim:
    """One task, accepted, admitted and claimed by an instance of its own."""
    return claim_of(database, accepted(database, mode=mode, max_attempts=max_attempts), mode, lease_s=30)


def claim_of(database: Database, run: Accepted, mode: Mode = Mode.PERSISTENT, *, lease_s: float = 300) -> Claim:
    """The only task of a run that was accepted, admitted and claimed by an instance of its own."""
    (item,) = dispatched(database, run, mode)
    return taken(database, item.message, ready_instance(database, mode), lease_s)


def taken(database: Database, message: WakeUpMessage, instance_id: UUID | None = None, lease_s: float = 30) -> Claim:
    """An admitted attempt, claimed by an instance (or one of its own), which it is for."""
    found = attempts.claim(database, message, instance_id or ready_instance(database), lease_s=lease_s)
    assert found is not None
    return found


def a_session(**values: Any) -> ModelSession:
    """Of an attempt whose calls the gateway takes."""
    given = {
        **{name: new_id() for name in ("attempt_id", "task_id", "run_id")},
        "number": 1,
        "user": "alice",
        "agent": "mini-swe-agent",
        "task_name": "fix-it",
        "replica": 0,
        "live": True,
        "model": ModelChoice(name="m"),
        "limits": Limits(max_steps=1_000_000),
    }
    return ModelSession(**(given | values))


def next_of(database: Database, ended: Claim) -> Claim:
    """The task's next attempt, claimed."""
    with database.begin() as connection:
        assert admission.promote(connection, 10) == 1
        (item,) = admission.admit(connection, [(ended.task_id, Mode.PERSISTENT)])
    return taken(database, item.message)


def failed(
    database: Database,
    claim: Claim,
    reason: EndReason = EndReason.ENVIRONMENT_ERROR,
    *,
    permanent: bool = False,
    error: str = "EnvironmentFailed",
) -> None:
    """An attempt that ends without a score."""
    failure = Failure(error=error, message="the container vanished")
    ends.fail(database, claim, end_reason=reason, failure=failure, retry=RETRY, permanent=permanent)


def new_id() -> UUID:
    return uuids.uuid7()
