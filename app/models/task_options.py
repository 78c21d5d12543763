"""How tasks are to run, as a producer says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TypedDict

from app.models.graphs import ArtifactReference, KnownTask
from app.models.overrides import EnvironmentOverrides, LimitOverrides
from app.models.spec import Mode, ModelChoice


class TaskOptions(TypedDict, total=False):
    """How tasks are to run, for `MegaFlow.enqueue` and `enqueue_many`."""

    mode: Mode | str  # `ephemeral`, `persistent` or `auto`
    model: ModelChoice | str | None  # its name at the settings' endpoint or in `megaflow models`; `replay`: scripted
    priority: int  # higher goes first
    user_name: str  # on whose account
    idempotency_key: str | None  # the same key submits once
    resource_class: str  # what `megaflow classes` lists
    available_at: datetime | None  # not before; with a time zone, as the next
    deadline_at: datetime | None  # what has not ended by then ends as `expired`
    overrides: EnvironmentOverrides | None  # go before what the task says of its environment
    limits: LimitOverrides | None  # go before what the task says of its limits
    agent_args: Mapping[str, str] | None  # for the agent's adapter; `megaflow agents` has the keys that each takes
    rewards: Mapping[str, float] | None  # by end reason or `not_submitted`, whatever the tests say
    record_diffs: bool  # keep the repository's diff after each step
    include_quarantined: bool  # also tasks that a validation put in quarantine
    after: Sequence[KnownTask]  # handles: begins when they have succeeded; what does not succeed cancels it
    inputs: Mapping[str, ArtifactReference]  # artifacts of earlier tasks, as files at these paths; comes after them
