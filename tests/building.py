"""Small real objects for tests: tasks, specs, instances in the ledger."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from uuid_utils import compat as uuids

from app.ledger import accept, admission, attempts, instances
from app.ledger.accept import Accepted, NewRun
from app.ledger.admission import QueuedMessage
from app.ledger.attempts import Claim
from app.ledger.database import Database
from app.ledger.instances import InstanceDemand
from app.models.endings import RetryPolicy
from app.models.instance import InstanceMode
from app.models.outcome import TaskResult
from app.models.spec import AgentTask, Bundle, EnvironmentSpec, Limits, Mode, ScriptGoal, TaskSpec
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
    found = attempts.claim(database, item.message, ready_instance(database, mode), lease_s=lease_s)
    assert found is not None
    return found


def new_id() -> UUID:
    return uuids.uuid7()
