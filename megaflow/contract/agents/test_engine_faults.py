"""The contract's faults of the model's engine: each ends the attempt soon, and none is ever counted as a result."""

from __future__ import annotations

import pytest

from app.agents.reconcile import reconciled
from app.models.endings import EndReason
from app.models.model_calls import Account, CallEnd
from megaflow.contract.agents.fixtures import Play
from megaflow.contract.agents.test_ends import assert_evidence

_MAY_SAY = (EndReason.MODEL_ERROR, EndReason.AGENT_ERROR, EndReason.SUBMITTED)
"""A framework may take rubbish for an answer, or a refused key for an error of its own. What it must not do is to try
on until its time is up: that would be AGENT_TIMEOUT."""


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
