"""Defines a producer's options for running tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TypedDict

from app.models.graphs import ArtifactReference, KnownTask
from app.models.overrides import EnvironmentOverrides, LimitOverrides
from app.models.spec import Mode, ModelChoice


class TaskOptions(TypedDict, total=False):
    """Options for running tasks, for `MegaFlow.enqueue` and `enqueue_many`."""

    mode: Mode | str  # `ephemeral`, `persistent` or `auto`
    model: ModelChoice | str | None  # name at the settings' endpoint or in `megaflow models`; `replay`: scripted
    priority: int  # higher goes first
    user_name: str  # user to be charged
    idempotency_key: str | None  # the same key submits once
    resource_class: str  # a class of `megaflow classes`
    available_at: datetime | None  # earliest start; this and the next with a time zone
    deadline_at: datetime | None  # tasks not ended by then end as `expired`
    overrides: EnvironmentOverrides | None  # override the task's environment
    limits: LimitOverrides | None  # override the task's limits
    agent_args: Mapping[str, str] | None  # for the agent's adapter; `megaflow agents` lists the keys
    rewards: Mapping[str, float] | None  # by end reason or `not_submitted`; override the tests' result
    record_diffs: bool  # store the repository's diff after each step
    include_quarantined: bool  # also tasks quarantined by a validation
    after: Sequence[KnownTask]  # handles of tasks that must succeed first; if one does not, the task is cancelled
    inputs: Mapping[str, ArtifactReference]  # artifacts of earlier tasks, as files at these paths; also depends on them
