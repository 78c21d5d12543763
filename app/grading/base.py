"""Defines the interface of a grader."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from app.models.outcome import StoredPath, Verdict
from app.models.shell import Shell
from app.models.spec import AgentTask

BROKE_GRADING = "broke grading"
"""Start of a verdict's detail when the submission broke its own grading."""
NO_SUCH_PROGRAM = (126, 127)
"""Exit codes of a POSIX shell for a program that is missing or cannot be run."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A file (its bytes) or a folder (an uncompressed tar of it), by its path in the agent's environment."""

    path: str
    content: bytes
    is_folder: bool

    @classmethod
    def split(cls, bundle: bytes, paths: Sequence[StoredPath]) -> tuple[HandedOver, ...]:
        """Splits artifacts that were stored in one piece."""
        stream = io.BytesIO(bundle)
        return tuple(cls(one.path, stream.read(one.size_bytes), one.is_folder) for one in paths)


@dataclass(frozen=True, slots=True)
class GradingInput:
    """Input of a grader. `patch` is None when the task has no repository; `tests_files` is the hidden folder as a tar.

    `handed_over`: artifacts of the agent's environment for a separate verifier. `control`: whether the tests may get
    one more that must fail (`control_test`). `quiet_s`: if so, they are ended after this much silence (None: never).
    """

    task: AgentTask
    patch: bytes | None
    tests_files: bytes | None
    handed_over: tuple[HandedOver, ...] = ()
    control: bool = True
    quiet_s: float | None = None


@dataclass(frozen=True, slots=True)
class Grade:
    """The verdict and the evidence: the test command's whole output.

    `unended`: the command reached its time limit, or was killed by its own child; the fault is not decided here.
    `doubtful`: there is no reward, and a control test may be the cause. `cut_short`: ended before its time limit.
    """

    verdict: Verdict
    report: bytes
    unended: bool = False
    doubtful: bool = False
    cut_short: bool = False


def out_of_memory(submission: GradingInput) -> str:
    """Returns the message for tests during which the kernel killed processes for lack of memory."""
    limit_bytes = submission.task.environment.resources.most.memory_bytes
    return f"while the tests ran, processes were killed at the environment's memory limit of {limit_bytes} bytes"


class Grader(Protocol):
    """Grades one kind of goal."""

    fresh_environment: bool  # True: grade in a new environment without the agent

    def grade(self, submission: GradingInput, shell: Shell) -> Grade:
        """Grades. A bad submission (a patch that does not apply, failing tests) is a verdict, not an error.

        Raises: GradingFailed when nothing could be scored; EnvironmentFailed.
        """
        ...
