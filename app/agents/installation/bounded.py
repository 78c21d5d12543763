"""Runs one program of an installation so that it outlives neither its time nor the installer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SUPERVISOR = Path(__file__).parents[1] / "running" / "supervisor.py"
_GRACE_S = 2.0  # between SIGTERM and SIGKILL
_LAST_S = 40.0  # the supervisor gives up before


@dataclass(frozen=True, slots=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def start(argv: Sequence[str], *, locks: Sequence[int] = (), **options: Any) -> tuple[subprocess.Popen[Any], int, int]:
    """The supervisor of `argv`, with pipes for its outputs; the pipe that stops it, and the one that tells its end.

    options: of `subprocess.Popen`. Raises: OSError.
    """
    control, stopping = os.pipe()
    status, telling = os.pipe()
    words = [sys.executable, "-I", "-S", str(_SUPERVISOR), str(control), str(telling), str(_GRACE_S), *argv]
    pipe, handed = subprocess.PIPE, (control, telling, *locks)
    try:
        supervisor = subprocess.Popen(  # noqa: S603  no shell; our own words and paths
            words, stdout=pipe, stderr=pipe, pass_fds=handed, start_new_session=True, **options
        )
        return supervisor, stopping, status
    except BaseException:
        os.close(stopping)
        os.close(status)
        raise
    finally:
        os.close(control)
        os.close(telling)


def run_bounded(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None,
    cwd: Path | None,
    timeout_s: float,
    locks: Sequence[int],
) -> Done:
    """Run `argv` to its end; what it started is gone then, also what it left in the background.

    When we die it is killed, too. `locks` are files whose lock is held until all of it is gone: the next
    holder of the lock finds no process writing.

    Raises: OSError: it cannot be started; subprocess.TimeoutExpired: it was killed for its time.
    """
    how = {"env": env, "cwd": cwd, "stdin": subprocess.DEVNULL, "text": True, "errors": "replace"}
    supervisor, stopping, status = start(argv, locks=locks, **how)
    with open(status, encoding="utf-8", errors="replace") as told, supervisor:
        try:
            stdout, stderr = supervisor.communicate(timeout=timeout_s)
        finally:
            os.close(stopping)
            _await(supervisor)
        word, _, what = told.read().strip().partition(" ")
    if word == "failed":
        raise OSError(what)
    return Done(int(what) if word == "ended" and what.lstrip("-").isdigit() else -9, stdout, stderr)


def _await(supervisor: subprocess.Popen[str]) -> None:
    try:
        supervisor.wait(_LAST_S)
    except subprocess.TimeoutExpired:
        supervisor.kill()
