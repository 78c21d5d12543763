"""Defines end reasons and the table that decides about retries.

Implements promise 7: an infrastructure fault is retried or reported as not scored; it never gives reward 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from app import errors
from app.models.spec import NOT_SUBMITTED


class EndReason(StrEnum):
    """Reasons why an attempt ended; a closed set."""

    SUBMITTED = "submitted"  # the agent reported that it is done
    STEP_LIMIT = "step_limit"  # the agent used up its turns
    CONTEXT_EXHAUSTED = "context_exhausted"  # the conversation no longer fits the model
    BUDGET_EXHAUSTED = "budget_exhausted"  # the model calls used up the attempt's budget
    AGENT_TIMEOUT = "agent_timeout"  # the agent used up its time
    AGENT_ERROR = "agent_error"  # the framework failed, or got no usable reply from the model
    RESOURCE_LIMIT = "resource_limit"  # the environment exceeded a resource limit and was ended
    CANCELLED = "cancelled"  # cancelled by a user
    RUN_BUDGET = "run_budget"  # the run used up its budget
    EXPIRED = "expired"  # the deadline set for the task or the run has passed
    SUPERSEDED = "superseded"  # the group is complete without this attempt
    INTERRUPTED = "interrupted"  # deployment, drain or spot: not the task's fault, uses up no retry
    MODEL_ERROR = "model_error"  # the endpoint refused, failed or did not answer
    GRADING_ERROR = "grading_error"  # the grader gave no verdict
    ENVIRONMENT_ERROR = "environment_error"  # image, build or container
    INVALID_SPEC = "invalid_spec"  # the request is invalid
    DEADLINE = "deadline"  # the attempt outlived its deadline and was stopped from outside
    LOST = "lost"  # the worker or its instance vanished
    INFRASTRUCTURE = "infrastructure"  # any other fault of MegaFlow


class Blame(StrEnum):
    """Party responsible for an end reason."""

    RESULT = "result"  # data: graded, counted, never retried
    PERSON = "person"  # a decision by a person or for the group: not counted, not retried
    INFRASTRUCTURE = "infrastructure"  # MegaFlow's fault: retried, else reported as not scored
    INTERRUPTION = "interruption"  # by MegaFlow: run again without using up a retry


def reward_by_rule(rules: Mapping[str, float], reason: EndReason) -> float | None:
    """Returns the reward by a run's rules; a rule for the end reason overrides `not_submitted`. None: no rule."""
    if reason.value in rules:
        return rules[reason.value]
    return rules.get(NOT_SUBMITTED) if reason is not EndReason.SUBMITTED else None


BLAME: dict[EndReason, Blame] = {
    EndReason.SUBMITTED: Blame.RESULT,
    EndReason.STEP_LIMIT: Blame.RESULT,
    EndReason.CONTEXT_EXHAUSTED: Blame.RESULT,
    EndReason.BUDGET_EXHAUSTED: Blame.RESULT,
    EndReason.AGENT_TIMEOUT: Blame.RESULT,
    EndReason.AGENT_ERROR: Blame.RESULT,
    EndReason.RESOURCE_LIMIT: Blame.RESULT,
    EndReason.CANCELLED: Blame.PERSON,
    EndReason.EXPIRED: Blame.PERSON,
    EndReason.SUPERSEDED: Blame.PERSON,
    EndReason.RUN_BUDGET: Blame.PERSON,
    EndReason.INTERRUPTED: Blame.INTERRUPTION,
    EndReason.MODEL_ERROR: Blame.INFRASTRUCTURE,
    EndReason.GRADING_ERROR: Blame.INFRASTRUCTURE,
    EndReason.ENVIRONMENT_ERROR: Blame.INFRASTRUCTURE,
    EndReason.INVALID_SPEC: Blame.INFRASTRUCTURE,
    EndReason.DEADLINE: Blame.INFRASTRUCTURE,
    EndReason.LOST: Blame.INFRASTRUCTURE,
    EndReason.INFRASTRUCTURE: Blame.INFRASTRUCTURE,
}

# End reason of each exception type, most specific type first; all other types are INFRASTRUCTURE.
_BY_ERROR: tuple[tuple[type[BaseException], EndReason], ...] = (
    (errors.AgentFailed, EndReason.AGENT_ERROR),
    (errors.ModelEndpointUnavailable, EndReason.MODEL_ERROR),
    (errors.CallThrottled, EndReason.MODEL_ERROR),
    (errors.GradingFailed, EndReason.GRADING_ERROR),
    (errors.ImageUnavailable, EndReason.ENVIRONMENT_ERROR),
    (errors.ImageBuildFailed, EndReason.ENVIRONMENT_ERROR),
    (errors.EnvironmentFailed, EndReason.ENVIRONMENT_ERROR),
    (errors.SpecInvalid, EndReason.INVALID_SPEC),
)


# Another attempt would fail in the same way: these errors end the task at once, as not scored.
PERMANENT: tuple[type[BaseException], ...] = (
    errors.ImageBuildFailed,
    errors.ImageUnfit,
    errors.SpecInvalid,
    errors.UnknownName,
    errors.AgentUnsuitable,
    errors.AgentNotSetUp,
    errors.ModelRefused,
)


# The cause can be temporary (busy host, short network outage, outdated registry), so the task is retried once. The
# same error a second time ends the task as not scored.
PERMANENT_WHEN_REPEATED: tuple[type[BaseException], ...] = (
    errors.SetupFailed,
    errors.SetupTimedOut,
    errors.ImageMissing,
    errors.ImageDenied,
    errors.TestRunnerMissing,
)


def reason_of(error: BaseException) -> EndReason:
    """Returns the end reason of an exception."""
    for kind, reason in _BY_ERROR:
        if isinstance(error, kind):
            return reason
    return EndReason.INFRASTRUCTURE


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Delay before the next attempt after an infrastructure fault: doubles from `base_s` to `cap_s` seconds.

    The actual delay is random, between half and all of it, so that many retries do not start at the same time.
    """

    base_s: float
    cap_s: float
