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
"""So begins the detail of a verdict on a submission that broke its own grading."""
NO_SUCH_PROGRAM = (126, 127)
"""A POSIX shell's codes for a program that is not there or cannot be run."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A file (its bytes) or a folder (an uncompressed tar of it), by its path in the agent's environment."""

    path: str
    content: bytes
    is_folder: bool

    @classmethod
    def split(cls, bundle: bytes, paths: Sequence[StoredPath]) -> tuple[HandedOver, ...]:
        """Of what was stored in one piece."""
        stream = io.BytesIO(bundle)
        return tuple(cls(one.path, stream.read(one.size_bytes), one.is_folder) for one in paths)


@dataclass(frozen=True, slots=True)
class GradingInput:
    """What is judged. `patch` is None when the task has no repository; `tests_files` is the hidden folder as a tar.

    `handed_over`: what a verifier apart gets of the agent's environment. `control`: whether the tests may have one more
    that must fail (`control_test`); `quiet_s`: then, after as much silence they are ended (None: never).
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

    `unended`: the command was ended for its time, or killed by what ran in it. Whose fault that is it does not say.
    `doubtful`: there is no reward, and a control among the tests may be to blame. `cut_short`: ended before its time.
    """

    verdict: Verdict
    report: bytes
    unended: bool = False
    doubtful: bool = False
    cut_short: bool = False


def out_of_memory(submission: GradingInput) -> str:
    """What is said of tests during which the kernel killed for want of memory."""
    limit_bytes = submission.task.environment.resources.most.memory_bytes
    return f"while the tests ran, processes were killed at the environment's memory limit of {limit_bytes} bytes"


class Grader(Protocol):
    """Judges one kind of goal."""

    fresh_environment: bool  # True: judge in an environment in which the agent never was

    def grade(self, submission: GradingInput, shell: Shell) -> Grade:
        """Judge. A bad submission (a patch that does not apply, failing tests) is a verdict, not an error.

        Raises: GradingFailed when nothing could be scored; EnvironmentFailed.
        """
        ...
