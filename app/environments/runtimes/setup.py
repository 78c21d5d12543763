"""Carrying out a task's set-up commands, in whichever environment: what failed is told in the same way everywhere."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence

from app.errors import EnvironmentOverLimit, SetupFailed, SetupTimedOut
from app.models.shell import CommandResult, Shell

_TOLD_CHARACTERS = 2000
"""Of a command's output, its end."""


def carry_out(commands: Sequence[str], shell: Shell, deadline: float) -> None:
    """One after the other, until `deadline` (monotonic).

    Raises: SetupFailed: a command left with another exit code than 0, or wrote more than the environment may;
        SetupTimedOut; EnvironmentFailed: the environment is gone.
    """
    for command in commands:
        try:
            result = shell.run(command, timeout_s=max(0.1, deadline - time.monotonic()))
        except EnvironmentOverLimit as error:
            raise SetupFailed(f"set-up command {shlex.quote(command)}: {error}") from error
        if result.timed_out:
            raise SetupTimedOut(_told(command, "ran out of the environment's time", result))
        if not result.ok:
            raise SetupFailed(_told(command, f"exit code {result.exit_code}", result))


def _told(command: str, how: str, result: CommandResult) -> str:
    said = result.text()[-_TOLD_CHARACTERS:].strip() or "(no output)"
    return f"set-up command {shlex.quote(command)}: {how}: {said}"
