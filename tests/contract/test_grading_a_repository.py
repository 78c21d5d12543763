"""Grading a repository's goal in every kind of environment: over its real session, with a real repository inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from app.environments.contract import Environment
from app.grading import grader_for
from app.grading.base import Grade, GradingInput
from app.grading.suite_run import read_report
from app.models.outcome import TestStatus
from app.models.spec import AgentTask, EnvironmentSpec, Limits, TestsGoal

GIT = "git -c user.name=a -c user.email=a@b.invalid"
PATCH = b"--- a/word\n+++ b/word\n@@ -1 +1 @@\n-bad\n+good\n"
TEST = "[ $(cat word) = good ] && echo 'PASSED a.py::x' || echo 'FAILED a.py::x'"
Grading = Callable[..., Grade]


@pytest.fixture
def grade(own: Environment) -> Grading:
    """Grades in a repository of one file."""
    folder = own.run("mktemp -d", timeout_s=30).stdout.decode().strip()
    made = own.run(
        f"{GIT} init -q && echo bad >word && git add word && {GIT} commit -qm base", cwd=folder, timeout_s=60
    )
    if not made.ok:
        pytest.skip(f"no git in this environment: {made.text()}")
    inside = _Inside(own, folder)

    def graded(command: str, *, timeout_s: float = 60.0, **changes: Any) -> Grade:
        goal = TestsGoal(
            base_commit="HEAD", test_command=command, fail_to_pass=("a.py::x",), pass_to_pass=(), **changes
        )
        spec = EnvironmentSpec(image="i", workdir=folder)
        limits = Limits(grading_timeout_s=timeout_s)
        task = AgentTask(name="t", description="d", environment=spec, goal=goal, limits=limits)
        return grader_for(goal).grade(GradingInput(task, PATCH, None), inside)  # type: ignore[arg-type]

    return graded


class _Inside:
    """The environment, with another working folder."""

    def __init__(self, environment: Environment, folder: str) -> None:
        self._environment = environment
        self._folder = folder

    def run(self, command: str, **how: Any) -> Any:
        return self._environment.run(command, **{"cwd": self._folder, **how})

    def stream(self, argv: Any, **how: Any) -> Any:
        return self._environment.stream(argv, **{"cwd": self._folder, **how})

    def put(self, path: str, content: bytes) -> None:
        self._environment.put(path, content)


def test_the_output_comes_over_the_session_and_is_judged(grade: Grading) -> None:
    got = grade(TEST, install_command="echo built")
    assert (got.verdict.reward, got.verdict.tests) == (1.0, {"a.py::x": TestStatus.PASSED})
    assert b"--- install_command: exit code 0 ---\nbuilt\n" in got.report
    assert read_report(got.report).judged == "PASSED a.py::x\n"


def test_long_output_comes_whole(grade: Grading) -> None:
    got = grade(f"seq 1 700000; {TEST}; seq 1 700000")
    assert got.verdict.reward == 1.0
    assert len(got.report) > 9_000_000


def test_tests_without_an_end_are_a_result(grade: Grading) -> None:
    got = grade(f"{TEST}; sleep 1000", timeout_s=3.0)
    assert (got.verdict.reward, got.verdict.counts) == (0.0, True)
    assert got.verdict.detail == "tests did not end within 3 s"
    assert got.verdict.tests == {"a.py::x": TestStatus.PASSED}


def test_what_tests_leave_running_is_not_waited_for(grade: Grading) -> None:
    assert grade(f"sleep 50 & {TEST}").verdict.reward == 1.0


def test_tests_that_kill_the_shell_around_them_get_no_reward(grade: Grading) -> None:
    got = grade(f"{TEST}; kill -9 $PPID; sleep 1")
    assert (got.verdict.reward, got.verdict.counts) == (0.0, True)
    assert "killed before its end" in got.verdict.detail


@pytest.mark.needs("isolates")
def test_tests_that_kill_everything_around_them_get_no_reward(grade: Grading) -> None:
    got = grade(f"{TEST}; kill -9 -1; sleep 1")
    assert (got.verdict.reward, got.verdict.counts) == (0.0, True)
