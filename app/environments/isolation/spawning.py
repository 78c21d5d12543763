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
"""The number that the inherited socket gets: the first file that a runtime hands on."""

FREE_FROM = 10
"""Files of this process have numbers from here on, so that none lies where the child's are put."""

ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_copies: dict[Hashable, int] = {}


def spawn(command: Sequence[str], files: Mapping[int, int]) -> int:
    """Start `command` with `files` alone (the child's number, ours), as `subprocess` cannot. Raises: OSError."""
    with ExitStack() as stack:
        actions = []
        for number, handle in files.items():
            high = fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, FREE_FROM)
            stack.callback(os.close, high)
            actions.append((os.POSIX_SPAWN_DUP2, high, number))
        return os.posix_spawn(command[0], list(command), ENVIRONMENT, file_actions=actions)


def run(command: Sequence[str], files: Mapping[int, int], *, timeout_s: float) -> int:
    """Run to the end; the exit code. Raises: OSError; EnvironmentFailed: it did not end in time, and was killed."""
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
    os.kill(pid, signal.SIGKILL)  # ours and not waited for: the number is still its own
    os.waitpid(pid, 0)


def sealed(key: Hashable, content: Callable[[], bytes]) -> int:
    """A file in memory that cannot be changed (a descriptor, not to be closed), made once per key and process."""
    mine = (os.getpid(), key)
    if mine not in _copies:
        copy = os.memfd_create("sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with open(copy, "wb", closefd=False) as file:
                file.write(content())
            fcntl.fcntl(copy, fcntl.F_ADD_SEALS, _SEALS)
            _copies[mine] = fcntl.fcntl(copy, fcntl.F_DUPFD_CLOEXEC, FREE_FROM)  # if two threads make one, both work
        finally:
            os.close(copy)
    return _copies[mine]


def program_at(descriptor: int) -> str:
    """By which path such a file is executed."""
    return f"/proc/self/fd/{descriptor}"
