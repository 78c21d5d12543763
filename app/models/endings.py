"""End reasons, and the one table that decides about retries.

Promise 7 lives here: an infrastructure fault is retried or reported as not scored; it is never reward 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from app import errors
from app.models.spec import NOT_SUBMITTED


class EndReason(StrEnum):
    """Why an attempt ended; a closed set."""

    SUBMITTED = "submitted"  # the agent says that it is done
    STEP_LIMIT = "step_limit"  # the agent used up its turns
    CONTEXT_EXHAUSTED = "context_exhausted"  # the conversation no longer fits the model
    BUDGET_EXHAUSTED = "budget_exhausted"  # its model calls used up the money that it may spend
    AGENT_TIMEOUT = "agent_timeout"  # the agent used up its time
    AGENT_ERROR = "agent_error"  # the framework broke, or got no usable reply out of the model
    RESOURCE_LIMIT = "resource_limit"  # what the agent ran took more than its environment may, which was ended for it
    CANCELLED = "cancelled"  # somebody asked for it
    RUN_BUDGET = "run_budget"  # its run has used up the money that somebody gave it
    EXPIRED = "expired"  # the deadline that its producer gave the task or the run has passed
    SUPERSEDED = "superseded"  # its group is complete without it
    INTERRUPTED = "interrupted"  # deploy, drain or spot: not the task's fault, no retry used up
    MODEL_ERROR = "model_error"  # the endpoint refused, failed or did not answer
    GRADING_ERROR = "grading_error"  # the grader could not judge
    ENVIRONMENT_ERROR = "environment_error"  # image, build or container
    INVALID_SPEC = "invalid_spec"  # what was asked for is refused as it stands
    DEADLINE = "deadline"  # the attempt outlived its deadline and was stopped from outside
    LOST = "lost"  # the worker or its instance vanished
    INFRASTRUCTURE = "infrastructure"  # anything else of ours


class Blame(StrEnum):
    """Whose ending it is."""

    RESULT = "result"  # data: graded, counted, never retried
    PERSON = "person"  # a decision, of a person or for the group: not counted, not retried
    INFRASTRUCTURE = "infrastructure"  # ours: retried, else reported as not scored
    INTERRUPTION = "interruption"  # ours: run again without using up a retry


def reward_by_rule(rules: Mapping[str, float], reason: EndReason) -> float | None:
    """What a run's rules give to an end; the end's own rule goes before the one of `not_submitted`. None: no rule."""
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

# What a station's exception means, most specific first; whatever is not named is INFRASTRUCTURE.
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


# Running the same recipe again gives the same refusal: these end the task at once, as not scored.
PERMANENT: tuple[type[BaseException], ...] = (
    errors.ImageBuildFailed,
    errors.ImageUnfit,
    errors.SpecInvalid,
    errors.UnknownName,
    errors.AgentUnsuitable,
    errors.AgentNotSetUp,
    errors.ModelRefused,
)


# A busy host, a network that was away for a moment, or a registry that is behind can be the reason, so that it is tried
# once more; what meets it again ends the task, as not scored.
PERMANENT_WHEN_REPEATED: tuple[type[BaseException], ...] = (
    errors.SetupFailed,
    errors.SetupTimedOut,
    errors.ImageMissing,
    errors.ImageDenied,
    errors.TestRunnerMissing,
)


def reason_of(error: BaseException) -> EndReason:
    """The end reason that an exception stands for."""
    for kind, reason in _BY_ERROR:
        if isinstance(error, kind):
            return reason
    return EndReason.INFRASTRUCTURE


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The wait before the next attempt after an infrastructure fault: doubles from `base_s` to `cap_s` seconds.

    What is waited is somewhere between half and the whole of it, so that a crowd does not come back at once.
    """

    base_s: float
    cap_s: float
