"""What becomes of a grade that the control among the tests may have caused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from app.grading.base import Grade
from app.models.outcome import Verdict
from app.models.spec import AgentTask, EnvironmentSpec, TestsGoal
from app.workers import grading

PAID, UNPAID = Verdict(reward=1.0, counts=True), Verdict(reward=0.0, counts=True)
CAUGHT = PAID.suspected("it leaves out the control")


class Gradings:
    """Grades as told: of the submission and of the gold, each with a control beside the tests and without."""

    def __init__(self, patch: pytest.MonkeyPatch, submission: dict[bool, Grade], gold: dict[bool, bool]) -> None:
        self.asked: list[tuple[str, bool]] = []
        self._submission, self._gold = submission, gold
        patch.setattr(grading, "_controls", {})
        patch.setattr(grading, "_graded_in", self._graded)
        patch.setattr(grading, "_grades_gold_cleanly", self._cleanly)
        patch.setattr(grading, "environment_for", self._environment)

    def judge(self) -> Grade:
        names = {"fail_to_pass": ("a.py::test_a",), "pass_to_pass": ()}
        goal = TestsGoal(base_commit="HEAD", test_command="pytest a.py", **names)
        task = AgentTask(name="a", description="b", environment=EnvironmentSpec(image="any"), goal=goal)
        claimed = SimpleNamespace(spec=SimpleNamespace(task=task))
        context = SimpleNamespace(claimed=claimed, raise_if_stopped=lambda: None)
        return grading._judged(SimpleNamespace(context=context, patch=b""), object())  # type: ignore[arg-type]

    def _graded(self, _progress: Any, _env: Any, _patch: Any, *, control: bool, quiet_s: float | None = None) -> Grade:
        self.asked.append(("submission", control))
        graded = self._submission[control]
        return replace(graded, cut_short=graded.unended and quiet_s is not None)

    def _cleanly(self, _progress: Any, *, control: bool, quiet_s: float | None = None) -> bool:
        self.asked.append(("gold", control))
        return self._gold[control]

    @contextmanager
    def _environment(self, _context: Any, _name: str) -> Iterator[object]:
        yield object()


def grade(verdict: Verdict, *, unended: bool = False, doubtful: bool = False) -> Grade:
    return Grade(verdict, b"", unended=unended, doubtful=doubtful)


def test_a_run_that_hangs_beside_the_control_alone_is_graded_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = grade(UNPAID, unended=True, doubtful=True)
    gradings = Gradings(monkeypatch, {True: hangs, False: grade(PAID)}, {True: False, False: True})
    assert gradings.judge().verdict.reward == 1.0
    assert gradings.asked == [("submission", True), ("gold", True), ("gold", False), ("submission", False)]
    assert gradings.judge().verdict.reward == 1.0
    assert gradings.asked[4:] == [("submission", False)], "what is known of a task's control is not asked again"


def test_a_run_that_hangs_where_the_gold_does_not_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = grade(UNPAID, unended=True, doubtful=True)
    gradings = Gradings(monkeypatch, {True: hangs, False: grade(PAID)}, {True: True, False: True})
    with pytest.raises(grading.TestsUnended):
        gradings.judge()
    assert gradings.asked == [("submission", True), ("gold", True), ("submission", True)], "its silence alone ended it"


def test_a_gold_that_fails_for_its_own_reasons_does_not_pay_a_forgery(monkeypatch: pytest.MonkeyPatch) -> None:
    caught = grade(CAUGHT, doubtful=True)
    gradings = Gradings(monkeypatch, {True: caught, False: grade(PAID)}, {True: False, False: False})
    assert gradings.judge().verdict == CAUGHT
    assert gradings.asked == [("submission", True), ("gold", True), ("gold", False)]


def test_honest_work_that_a_second_run_breaks_is_graded_without_a_control(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = grade(UNPAID, doubtful=True)
    gradings = Gradings(monkeypatch, {True: broken, False: grade(PAID)}, {True: True, False: True})
    for _ in range(2):  # where the gold keeps no count of its calls, this submission may
        assert gradings.judge().verdict.reward == 1.0
    once = [("submission", True), ("submission", False)]
    assert gradings.asked == [*once, ("gold", True), *once]
