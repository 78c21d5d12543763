"""Judges the output of a test run: by a dataset's own library, by our parser of pytest, or by the exit code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

from app.errors import GradingFailed
from app.grading.reports import PARSERS, PYTEST_WORDS, Report
from app.grading.resident_libraries import GradingLibraries
from app.models.outcome import TestStatus
from app.models.spec import JudgeName, TestsGoal

_STATUSES: Mapping[str, TestStatus] = {**PYTEST_WORDS, "MISSING": TestStatus.MISSING}
"""Statuses of the libraries, and ours for each."""
_START, _END, _CODE = ">>>>> Start Test Output", ">>>>> End Test Output", ">>>>> Test Exit Code: "
"""Markers of two libraries: they read a log between them, up to the first end. Source: swebench 5.0.2 and swesmith."""
_READ_BETWEEN = (JudgeName.SWEBENCH_4, JudgeName.SWEBENCH_5, JudgeName.SWESMITH)


@dataclass(frozen=True, slots=True)
class Judgement:
    """Result of judging a test run. `statuses` has exactly the tests of both lists."""

    statuses: dict[str, TestStatus]
    resolved: bool
    grader: str  # name and version of the judge


def check_goal(goal: TestsGoal) -> None:
    """Raises: GradingFailed: no test is named, or our judge has no parser of that name."""
    if not goal.fail_to_pass and not goal.pass_to_pass:
        raise GradingFailed("expected at least one test in FAIL_TO_PASS or PASS_TO_PASS; found none; fix the row")
    if goal.judge is JudgeName.OWN and goal.log_parser not in PARSERS:
        raise GradingFailed(
            f"unknown log parser {goal.log_parser!r}; known to the judge 'own': {', '.join(sorted(PARSERS))}; "
            "name the dataset's own library as the judge, or a test command with a report that one of them reads"
        )


def judge(goal: TestsGoal, log: str, exit_code: int | None, libraries: GradingLibraries | None) -> Judgement:
    """Judges the run of the goal's test command.

    log: the command's output. exit_code: of the command; None: it did not end.

    Raises: GradingFailed: the library cannot run, cannot judge this log, or gives an invalid answer.
    """
    match goal.judge:
        case JudgeName.OWN:
            statuses = _own_statuses(goal, log)
            return Judgement(statuses, not broken(goal, statuses), own_name())
        case JudgeName.EXIT_CODE:
            statuses = _own_statuses(goal, log)
            # A program that ends the run at its import may give 0, too: the report must contain some test.
            unseen = goal.log_parser in PARSERS and set(statuses.values()) == {TestStatus.MISSING}
            return Judgement(statuses, exit_code == 0 and not unseen, f"exit code, {own_name()}")
        case JudgeName.SWEBENCH_4 | JudgeName.SWEBENCH_5 | JudgeName.MULTI_SWE_BENCH | JudgeName.SWESMITH:
            if libraries is None:
                raise GradingFailed(f"expected the grading library {goal.judge.value} to be at hand; found none here")
            goal_fields = goal.model_dump(include={"fail_to_pass", "pass_to_pass", "log_parser", "row"})
            answer, grader = libraries.judge(goal.judge, goal_fields, log, exit_code)
            return _read(goal, answer, grader)


def printed_marker(goal: TestsGoal, log: str) -> str:
    """Returns the rule, when the log has a library's marker that the row's own script did not print; otherwise empty.

    Such a marker would hide the rest of the log from the library, or give it another exit code.
    """
    if goal.judge not in _READ_BETWEEN:
        return ""
    end = log.rfind(_END)
    is_own = _START in goal.test_command and _END in goal.test_command and _START in log and end >= 0
    odd = [one for one in (_START, _END) if log.count(one) > (goal.test_command.count(one) if is_own else 0)]
    if _CODE in (log[:end] if is_own else log):
        odd.append(_CODE.strip())
    return f"the tests printed a marker of the grading library: {odd[0]}" if odd else ""


def broken(goal: TestsGoal, statuses: Mapping[str, TestStatus]) -> list[str]:
    """Returns tests of either list with a wrong status, by the rule of our own judge."""
    may_skip = set(goal.pass_to_pass) - set(goal.fail_to_pass)
    return [
        name
        for name in _names(goal)
        if statuses[name] is not TestStatus.PASSED and not (statuses[name] is TestStatus.SKIPPED and name in may_skip)
    ]


def partial_credit(goal: TestsGoal, judgement: Judgement) -> float:
    """Returns the share of `fail_to_pass` that passes; 0 if a test of `pass_to_pass` broke, 1 if all is resolved."""
    if judgement.resolved:
        return 1.0
    wrong = set(broken(goal, judgement.statuses))
    if not goal.fail_to_pass or wrong & set(goal.pass_to_pass):
        return 0.0
    return 1.0 - len(wrong & set(goal.fail_to_pass)) / len(set(goal.fail_to_pass))


def _names(goal: TestsGoal) -> Iterable[str]:
    return dict.fromkeys((*goal.fail_to_pass, *goal.pass_to_pass))


def _own_statuses(goal: TestsGoal, log: str) -> dict[str, TestStatus]:
    """Returns each test's status. Without a parser of that name nothing is read, and every test is missing."""
    parse = PARSERS.get(goal.log_parser)
    report = Report(parse(log) if parse else {})
    return {name: report.status(name) for name in _names(goal)}


def _read(goal: TestsGoal, answer: Mapping[str, Any], grader: str) -> Judgement:
    resolved, statuses = answer.get("resolved"), answer.get("statuses")
    if not isinstance(resolved, bool) or not isinstance(statuses, dict):
        raise GradingFailed(f"expected a verdict and statuses of {grader}; found {str(answer)[:200]}")
    unknown = {str(word) for word in statuses.values()} - set(_STATUSES)
    if unknown:
        raise GradingFailed(f"expected statuses such as {', '.join(_STATUSES)} of {grader}; found {sorted(unknown)}")
    return Judgement({name: _STATUSES[statuses.get(name, "MISSING")] for name in _names(goal)}, resolved, grader)


@cache
def own_name() -> str:
    """Returns this program's name, with its version."""
    try:
        return f"megaflow {metadata.version('megaflow')}"
    except metadata.PackageNotFoundError:
        return "megaflow"
