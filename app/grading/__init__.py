"""Graders: turn an agent's work into a verdict, one grader per kind of goal."""

from __future__ import annotations

from app.grading.base import Grader
from app.grading.judges import LibraryJudges
from app.grading.script_goal import ScriptGrader
from app.grading.tests_goal import TestsGrader
from app.models.spec import ScriptGoal, TestsGoal


def grader_for(goal: TestsGoal | ScriptGoal, libraries: LibraryJudges | None = None) -> Grader:
    """The grader of that kind of goal. libraries: of datasets that judge by their own; None: there are none here.

    Raises: GradingFailed: the goal asks for something that this version has not got.
    """
    match goal:
        case TestsGoal():
            return TestsGrader(goal, libraries)
        case ScriptGoal():
            return ScriptGrader(goal)
