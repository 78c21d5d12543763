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


def test_only_the_agents_own_failure_is_a_result_among_station_errors() -> None:
    results = {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type)
        and issubclass(kind, errors.StationError)
        and BLAME[reason_of(kind("x"))] is Blame.RESULT
    }
    assert results == {errors.AgentFailed}


@pytest.mark.parametrize(
    ("reason", "again", "names"),
    [
        (EndReason.ENVIRONMENT_ERROR, "yes", "ImageUnavailable EnvironmentFailed ServiceUnhealthy EnvironmentVanished"),
        (EndReason.ENVIRONMENT_ERROR, "yes", "NoPlaceToStart HostDiskFull"),
        (EndReason.ENVIRONMENT_ERROR, "once more", "ImageMissing ImageDenied SetupFailed SetupTimedOut"),
        (EndReason.ENVIRONMENT_ERROR, "never", "ImageBuildFailed ImageUnfit"),
        (EndReason.INVALID_SPEC, "never", "SpecInvalid"),
        (EndReason.MODEL_ERROR, "yes", "ModelEndpointUnavailable"),
        (EndReason.MODEL_ERROR, "never", "ModelRefused"),
        (EndReason.GRADING_ERROR, "yes", "GradingFailed"),
        (EndReason.GRADING_ERROR, "once more", "TestRunnerMissing"),
        (EndReason.AGENT_ERROR, "yes", "AgentFailed"),
        (EndReason.INFRASTRUCTURE, "yes", "AgentUnavailable DiskFull EngineUnavailable ArtifactStoreUnavailable"),
        (EndReason.INFRASTRUCTURE, "never", "AgentNotSetUp"),
    ],
)
def test_what_an_attempt_failed_of_says_how_it_ended_and_whether_it_is_tried_again(
    reason: EndReason, again: str, names: str
) -> None:
    for kind in (getattr(errors, name) for name in names.split()):
        assert reason_of(kind("x")) is reason
        never, once = issubclass(kind, PERMANENT), issubclass(kind, PERMANENT_WHEN_REPEATED)
        assert {(True, False): "never", (False, True): "once more", (False, False): "yes"}[never, once] == again


def test_what_nobody_expected_is_infrastructure() -> None:
    assert reason_of(RuntimeError("x")) is EndReason.INFRASTRUCTURE
