"""Processes of a measurement: where they may run, what they hold in memory, how one ends with the benchmark."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_LIBC = ctypes.CDLL(None)
_STOP_S = 15


def to_last_core() -> None:
    """Keep this process on the last core, so that load and engine never take more than that from what is measured."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) > 1:
        os.sched_setaffinity(0, allowed[-1:])


@contextmanager
def running(
    command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A process with pipes to its input and from its output, for the length of the block; all below it ends, too."""
    with log.open("ab") as errors:
        process = subprocess.Popen(  # noqa: S603 (ours and a peer's own programs)
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=None if env is None else dict(env),
            cwd=cwd,
            start_new_session=True,
            preexec_fn=lambda: _LIBC.prctl(_DIE_WITH_PARENT, int(signal.SIGTERM)),
        )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    below = _family(process.pid)[1:]
    with suppress(OSError):
        process.stdin.close()
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for left in below:
        with suppress(psutil.NoSuchProcess):
            left.kill()
    process.stdout.close()


def resident_bytes(pid: int) -> int:
    """Memory of a process and of those below it, as the kernel has it in RAM."""
    return sum(_resident(process) for process in _family(pid))


def cpu_s(pid: int) -> float:
    """Processor time that a process and those below it have used so far."""
    used = 0.0
    for process in _family(pid):
        with suppress(psutil.Error):
            times = process.cpu_times()
            used += times.user + times.system
    return used


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
