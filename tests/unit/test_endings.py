"""Whose fault an ending is, and what follows: the promise that infrastructure is not the model."""

from __future__ import annotations

import pytest

from app import errors
from app.models.endings import BLAME, PERMANENT, PERMANENT_WHEN_REPEATED, Blame, EndReason, reason_of


def test_every_end_reason_has_somebody_to_blame() -> None:
    assert set(BLAME) == set(EndReason)


def test_what_the_agent_did_is_a_result_and_never_retried() -> None:
    results = {reason for reason, blame in BLAME.items() if blame is Blame.RESULT}
    own = ("SUBMITTED", "STEP_LIMIT", "CONTEXT_EXHAUSTED", "BUDGET_EXHAUSTED", "AGENT_TIMEOUT", "AGENT_ERROR")
    assert results == {*(EndReason[name] for name in own), EndReason.RESOURCE_LIMIT}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.ImageUnavailable("x"), EndReason.ENVIRONMENT_ERROR),
        (errors.ImageBuildFailed("x"), EndReason.ENVIRONMENT_ERROR),
        (errors.EnvironmentFailed("x"), EndReason.ENVIRONMENT_ERROR),
        (errors.ImageMissing("x"), EndReason.ENVIRONMENT_ERROR),
        (errors.ImageDenied("x"), EndReason.ENVIRONMENT_ERROR),
        (errors.ImageUnfit("x"), EndReason.ENVIRONMENT_ERROR),
        (errors.SetupFailed("x"), EndReason.ENVIRONMENT_ERROR),
        (errors.SetupTimedOut("x"), EndReason.ENVIRONMENT_ERROR),
        (errors.ServiceUnhealthy("x"), EndReason.ENVIRONMENT_ERROR),
        (errors.EnvironmentVanished("x"), EndReason.ENVIRONMENT_ERROR),
        (errors.NoPlaceToStart("x"), EndReason.ENVIRONMENT_ERROR),
        (errors.HostDiskFull("x"), EndReason.ENVIRONMENT_ERROR),
        (errors.SpecInvalid("x"), EndReason.INVALID_SPEC),
        (errors.ModelEndpointUnavailable("x"), EndReason.MODEL_ERROR),
        (errors.GradingFailed("x"), EndReason.GRADING_ERROR),
        (errors.AgentFailed("x"), EndReason.AGENT_ERROR),
        (errors.DiskFull("x"), EndReason.INFRASTRUCTURE),
        (errors.EngineUnavailable("x"), EndReason.INFRASTRUCTURE),
        (errors.ArtifactStoreUnavailable("x"), EndReason.INFRASTRUCTURE),
        (RuntimeError("nobody expected this"), EndReason.INFRASTRUCTURE),
    ],
)
def test_a_fault_is_named_by_its_class(error: Exception, reason: EndReason) -> None:
    assert reason_of(error) is reason


def test_only_the_agents_own_failure_is_a_result_among_station_errors() -> None:
    results = {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type)
        and issubclass(kind, errors.StationError)
        and BLAME[reason_of(kind("x"))] is Blame.RESULT
    }
    assert results == {errors.AgentFailed}


def test_permanent_faults_are_refusals_not_outages() -> None:
    assert not any(issubclass(errors.AgentUnavailable, kind) for kind in PERMANENT)
    assert any(issubclass(errors.AgentNotSetUp, kind) for kind in PERMANENT)
    assert not any(issubclass(errors.EngineUnavailable, kind) for kind in PERMANENT)
    assert not any(issubclass(errors.ImageUnavailable, kind) for kind in PERMANENT)


@pytest.mark.parametrize(
    ("kind", "again"),
    [
        (errors.SetupFailed, "once more"),
        (errors.ImageUnfit, "never"),
        (errors.ImageMissing, "once more"),
        (errors.ImageDenied, "once more"),
        (errors.ImageUnavailable, "yes"),
        (errors.HostDiskFull, "yes"),
        (errors.DiskFull, "yes"),
        (errors.EngineUnavailable, "yes"),
        (errors.SpecInvalid, "never"),
        (errors.ModelRefused, "never"),
        (errors.ModelEndpointUnavailable, "yes"),
        (errors.TestRunnerMissing, "once more"),
        (errors.GradingFailed, "yes"),
        (errors.SetupTimedOut, "once more"),
        (errors.ServiceUnhealthy, "yes"),
        (errors.EnvironmentVanished, "yes"),
        (errors.NoPlaceToStart, "yes"),
        (errors.EnvironmentFailed, "yes"),
    ],
)
def test_what_an_attempt_failed_of_says_whether_it_is_tried_again(kind: type[Exception], again: str) -> None:
    never, once = issubclass(kind, PERMANENT), issubclass(kind, PERMANENT_WHEN_REPEATED)
    assert {(True, False): "never", (False, True): "once more", (False, False): "yes"}[never, once] == again
