"""Contract of the agent's own ends: it solves the task, or reaches a limit."""

from __future__ import annotations

from pathlib import Path

from app.agents.framework import Framework
from app.agents.reconcile import reconciled
from app.models.endings import EndReason
from app.models.model_calls import Account, CallEnd
from megaflow.contract.agents.fixtures import LIMITS, Play
from megaflow.contract.agents.trial import KEY, STARTED, Trial, TrialStage


def test_it_solves_the_task_and_leaves_evidence_and_nothing_else(play: Play, stage: TrialStage) -> None:
    trial = play("solve")
    assert trial.report.end_reason is EndReason.SUBMITTED, trial.report
    assert trial.solved
    assert trial.untracked == (), "nothing of its own is in the repository"
    assert trial.diff.count("diff --git") == 1
    assert trial.report.steps is None or trial.report.steps >= 3
    assert_evidence(trial)
    assert stage.environment.run("git log --oneline | wc -l", timeout_s=60).text().strip() == "1"


def test_the_models_key_is_in_nothing_that_is_kept_or_seen_by_commands(play: Play, tmp_path: Path) -> None:
    """The server refuses the key and quotes it, as real endpoints do."""
    trial = play("refused")
    assert KEY not in trial.report.detail
    leaks = [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert leaks == []


def test_its_turns_are_bounded(play: Play) -> None:
    trial = play("endless", limits=LIMITS.model_copy(update={"max_steps": 3}))
    assert trial.report.end_reason is EndReason.STEP_LIMIT, trial.report
    assert not trial.solved
    assert_evidence(trial)


def test_a_context_that_is_too_long_ends_it_as_that(play: Play) -> None:
    """Some frameworks shorten the context before they give up; none may hang, or report a fault of the model's host."""
    trial = play("too-long")
    assert trial.report.end_reason in _OWN_WORDS, trial.report
    end = CallEnd.CONTEXT_EXHAUSTED
    seen = Account(calls=2, turns=1, last_end=end, turn_end=end)  # as a gateway in front of the server counts
    assert reconciled(trial.report, seen).end_reason in (EndReason.CONTEXT_EXHAUSTED, EndReason.SUBMITTED)
    assert STARTED in trial.untracked
    assert_evidence(trial)


def test_every_ending_that_it_knows_means_something(framework: Framework) -> None:
    assert framework.endings
    assert all(isinstance(reason, EndReason) for reason in framework.endings.values())


_OWN_WORDS = (EndReason.CONTEXT_EXHAUSTED, EndReason.MODEL_ERROR, EndReason.AGENT_ERROR, EndReason.SUBMITTED)


def assert_evidence(trial: Trial) -> None:
    """Asserts that the attempt's log and files exist."""
    report = trial.report
    assert report.log is not None
    assert report.log.is_file()
    assert report.files is not None
    assert any(report.files.iterdir())
