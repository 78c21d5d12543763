"""The contract of a grader: turns what an agent left into a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from app.models.outcome import Verdict
from app.models.shell import Shell
from app.models.spec import AgentTask


@dataclass(frozen=True, slots=True)
class Submission:
    """What is judged. `patch` is None when the task has no repository; `tests_files` is the hidden folder as a tar."""

    task: AgentTask
    patch: bytes | None
    tests_files: bytes | None


@dataclass(frozen=True, slots=True)
class Grade:
    """The verdict and the evidence: the test command's whole output."""

    verdict: Verdict
    report: bytes


class Grader(Protocol):
    """Judges one kind of goal."""

    fresh_environment: bool  # True: judge in an environment in which the agent never was

    def grade(self, submission: Submission, shell: Shell) -> Grade:
        """Judge. A bad submission (a patch that does not apply, failing tests) is a verdict, not an error.

        Raises: GradingFailed when nothing could be measured; EnvironmentFailed.
        """
        ...
