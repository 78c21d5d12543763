"""Contract of the inference server's faults: each ends the attempt soon, and none counts as a result."""

from __future__ import annotations

import pytest

from app.agents.reconcile import reconciled
from app.models.endings import EndReason
from app.models.model_calls import Account, CallEnd
from megaflow.contract.agents.fixtures import Play
from megaflow.contract.agents.test_ends import assert_evidence

_MAY_SAY = (EndReason.MODEL_ERROR, EndReason.AGENT_ERROR, EndReason.SUBMITTED)
"""A framework may accept garbage as an answer, or report a refused key as its own error. It must not retry until its
time is up: that would be AGENT_TIMEOUT."""


@pytest.mark.parametrize(
    ("scene", "end"),
    [
        ("refused", CallEnd.UNAUTHORISED),
        ("busy", CallEnd.UPSTREAM_BUSY),
        ("broken", CallEnd.UPSTREAM_ERROR),
        ("garbage", CallEnd.UPSTREAM_ERROR),
        ("cut", CallEnd.CUT),
        ("silent", CallEnd.UPSTREAM_TIMEOUT),
    ],
)
def test_an_engine_that_never_answers_is_a_model_error_in_bounded_time(play: Play, scene: str, end: CallEnd) -> None:
    trial = play(scene)
    assert trial.report.end_reason in _MAY_SAY, trial.report
    assert not trial.solved
    assert_evidence(trial)
    seen = reconciled(trial.report, Account(calls=1, last_end=end, turn_end=end))
    assert seen.end_reason is EndReason.MODEL_ERROR


def test_an_engine_that_breaks_later_is_a_model_error_too(play: Play) -> None:
    trial = play("breaks-later")
    assert trial.report.end_reason in _MAY_SAY, trial.report
    assert_evidence(trial)
    broken = CallEnd.UPSTREAM_ERROR
    seen = reconciled(trial.report, Account(calls=3, turns=1, last_end=broken, turn_end=broken))
    assert seen.end_reason is EndReason.MODEL_ERROR
