"""Defines the overrides of a submission for its tasks: environments and limits."""

from __future__ import annotations

from typing import Any

from pydantic import Field, ValidationError

from app.errors import SpecInvalid
from app.models.resources import MOST_KILL_AT, Resources
from app.models.spec import AgentTask, EnvironmentSpec, Limits, Network, Reuse, ScriptGoal, Wire


class EnvironmentOverrides(Wire):
    """Overrides of the environment. A given value overrides the task's own value, which overrides the default.

    Exception: set-up commands run after the task's own set-up commands, which the task needs.
    """

    network: Network | None = None
    allowed_hosts: tuple[str, ...] = ()  # as `EnvironmentSpec.allowed_hosts`; imply the network `allowlist`
    reuse: Reuse | None = None
    setup: tuple[str, ...] = ()
    disk_bytes: int | None = None
    kill_at: float | None = Field(default=None, ge=1, le=MOST_KILL_AT)  # see `Resources.sized`

    def sized(self, task: AgentTask, default: Resources) -> AgentTask:
        """Returns the task with both resource sizes set, also for its verifier; call before `applied_to`."""

        def own(environment: EnvironmentSpec) -> EnvironmentSpec:
            resources = environment.resources.sized(self.kill_at, default)
            return environment.model_copy(update={"resources": resources})

        goal = task.goal
        if isinstance(goal, ScriptGoal) and goal.environment is not None:
            goal = goal.model_copy(update={"environment": own(goal.environment)})
        return task.model_copy(update={"environment": own(task.environment), "goal": goal})

    def applied_to(self, task: AgentTask) -> AgentTask:
        """Returns the task with the overrides. Raises: SpecInvalid: names the task and the conflict."""
        changes = self._changes(task)
        if not changes:
            return task
        environment = task.environment.model_dump() | changes
        try:
            return AgentTask.model_validate(task.model_dump() | {"environment": environment})
        except ValidationError as error:
            raise _refused(task, error) from error

    def _changes(self, task: AgentTask) -> dict[str, Any]:
        own, changes = task.environment, dict[str, Any]()
        if self.network is not None or self.allowed_hosts:
            network = self.network or Network.ALLOWLIST
            hosts = own.allowed_hosts if network is Network.ALLOWLIST else ()
            changes |= {"network": network, "allowed_hosts": self.allowed_hosts or hosts}
        if self.reuse is not None:
            changes["reuse"] = self.reuse
        if self.setup:
            changes["setup"] = (*own.setup, *self.setup)
        if self.disk_bytes is not None:
            changes["resources"] = own.resources.model_dump() | {"disk_bytes": self.disk_bytes}
        return changes


class LimitOverrides(Wire):
    """Limits, in units of `Limits`. A given limit overrides the task's own, which overrides the default."""

    agent_timeout_s: float | None = Field(default=None, gt=0)
    command_timeout_s: float | None = Field(default=None, gt=0)
    max_steps: int | None = Field(default=None, ge=1)
    max_turn_tokens: int | None = Field(default=None, ge=1)
    context_tokens: int | None = Field(default=None, ge=1)
    budget_usd: float | None = Field(default=None, gt=0)
    max_attempts: int | None = Field(default=None, ge=1, le=20)

    def applied_to(self, task: AgentTask) -> AgentTask:
        """Returns the task with the overrides. Raises: SpecInvalid."""
        changes = self.model_dump(exclude_none=True)
        if not changes:
            return task
        try:
            limits = Limits.model_validate(task.limits.model_dump() | changes)
        except ValidationError as error:
            raise _refused(task, error) from error
        return task.model_copy(update={"limits": limits})


def _refused(task: AgentTask, error: ValidationError) -> SpecInvalid:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return SpecInvalid(f"task {task.name!r}: {place}: {first['msg'].removeprefix('Value error, ')}")
