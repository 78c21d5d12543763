"""Runs a framework's command line as a process group that ends when we say so."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from app.models.shell import CancelToken

_GRACE_S = 2.0  # between SIGTERM and SIGKILL


class Stop(StrEnum):
    """Who ended a process."""

    ITSELF = "itself"
    TIMEOUT = "timeout"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class Ended:
    """How it ended. `returncode` is negative when a signal killed it, ours or another."""

    by: Stop
    returncode: int


def run_group(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    log: Path,
    timeout_s: float,
    cancel: CancelToken,
) -> Ended:
    """Run `argv` in a session of its own until it ends, its time is up, or `cancel` says stop.

    stdin is empty; stdout and stderr go to `log`. Nothing of its process group is left when this returns.

    Raises: OSError: it cannot be started.
    """
    cancelled = threading.Event()
    with log.open("wb") as sink:
        process = subprocess.Popen(  # noqa: S603  no shell; the task's text is not among the words
            argv,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def stop() -> None:
        cancelled.set()
        _end_group(process)

    take_back = cancel.on_cancel(stop)
    try:
        by = Stop.ITSELF
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            by = Stop.TIMEOUT
    finally:
        take_back()
        _end_group(process)
    return Ended(Stop.CANCEL if cancelled.is_set() else by, process.returncode)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM while the leader lives, a short grace, SIGKILL for whatever is left of its group."""
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    _signal_group(process, signal.SIGKILL)
    process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # the whole group is gone
        os.killpg(process.pid, number)
