"""Graders: turn an agent's work into a verdict, one grader per kind of goal."""

from __future__ import annotations

from app.grading.base import Grader
from app.grading.resident_libraries import GradingLibraries
from app.grading.script_goal import ScriptGrader
from app.grading.tests_goal import TestsGrader
from app.models.spec import ScriptGoal, TestsGoal


def grader_for(goal: TestsGoal | ScriptGoal, libraries: GradingLibraries | None = None) -> Grader:
    """Returns the grader of that kind of goal. libraries: for datasets with their own; None: not available here.

    Raises: GradingFailed: the goal needs something that this version does not support.
    """
    match goal:
        case TestsGoal():
            return TestsGrader(goal, libraries)
        case ScriptGoal():
            return ScriptGrader(goal)
