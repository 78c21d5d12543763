"""Starts a small helper program with given file descriptors and a deadline; keeps programs in sealed memory."""

from __future__ import annotations

import fcntl
import os
import select
import signal
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack

from app.errors import EnvironmentFailed

LISTENING = 3
"""Number that the inherited socket gets: the first file that a runtime passes on."""

FREE_FROM = 10
"""Files of this process get numbers from here on, so that none lies where the child's are put."""

ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_copies: dict[Hashable, int] = {}


def spawn(command: Sequence[str], files: Mapping[int, int]) -> int:
    """Starts `command` with `files` alone (child's number: ours), as `subprocess` cannot. Raises: OSError."""
    with ExitStack() as stack:
        actions = []
        for number, handle in files.items():
            high = fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, FREE_FROM)
            stack.callback(os.close, high)
            actions.append((os.POSIX_SPAWN_DUP2, high, number))
        return os.posix_spawn(command[0], list(command), ENVIRONMENT, file_actions=actions)


def run(command: Sequence[str], files: Mapping[int, int], *, timeout_s: float) -> int:
    """Runs to the end; returns the exit code. Raises: OSError; EnvironmentFailed: not ended in time, and killed."""
    pid = spawn(command, files)
    try:
        handle = os.pidfd_open(pid)
        try:
            ready = select.poll()
            ready.register(handle, select.POLLIN)
            in_time = bool(ready.poll(max(0.0, timeout_s) * 1000))
        finally:
            os.close(handle)
    except BaseException:
        _end(pid)
        raise
    if not in_time:
        _end(pid)
        raise EnvironmentFailed(f"expected the runtime to start an environment within {timeout_s:.1f} s; it hung.")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)  # our child, not waited for: the pid is still its own
    os.waitpid(pid, 0)


def sealed(key: Hashable, content: Callable[[], bytes]) -> int:
    """Returns a descriptor of an unchangeable file in memory, made once per key and process. Do not close it."""
    copy_key = (os.getpid(), key)
    if copy_key not in _copies:
        copy = os.memfd_create("sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with open(copy, "wb", closefd=False) as file:
                file.write(content())
            fcntl.fcntl(copy, fcntl.F_ADD_SEALS, _SEALS)
            _copies[copy_key] = fcntl.fcntl(copy, fcntl.F_DUPFD_CLOEXEC, FREE_FROM)  # if two threads make one, both do
        finally:
            os.close(copy)
    return _copies[copy_key]


def program_at(descriptor: int) -> str:
    """Returns the path by which such a file is executed."""
    return f"/proc/self/fd/{descriptor}"
