"""Starting a runtime: with the files that it hands on, and not for longer than it may take."""

from __future__ import annotations

import fcntl
import os
import select
import signal
from pathlib import Path

from app.errors import EnvironmentFailed

LISTENING = 3
"""The number that the inherited socket gets: the first file that a runtime hands on."""

FREE_FROM = 10
"""Files of ours have numbers from here on, so that none lies where the child's are put."""

_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}


def run(command: list[str], listening: int, *, nothing: Path, libraries: Path | None = None, timeout_s: float) -> int:
    """Run to the end, with `listening` as the third file after nothing in, nothing out; the exit code.

    nothing: a device like /dev/null, but not that of the host: its owner may be changed. libraries: where the command's
    are looked for first.

    Not by `subprocess`, which cannot say which number a file gets.

    Raises: EnvironmentFailed: it did not end in time, and was killed.
    """
    device = os.open(nothing, os.O_RDWR | os.O_CLOEXEC)
    kept = [fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, FREE_FROM) for handle in (device, listening)]
    os.close(device)
    try:
        files = [(os.POSIX_SPAWN_DUP2, kept[0], number) for number in (0, 1, 2)]
        files.append((os.POSIX_SPAWN_DUP2, kept[1], LISTENING))
        variables = _ENVIRONMENT if libraries is None else {**_ENVIRONMENT, "LD_LIBRARY_PATH": str(libraries)}
        pid = os.posix_spawn(command[0], command, variables, file_actions=files)
    finally:
        for handle in kept:
            os.close(handle)
    in_time = _ended_within(pid, timeout_s)
    if not in_time:
        os.kill(pid, signal.SIGKILL)  # ours and not waited for: the number is still its own
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not in_time:
        raise EnvironmentFailed(f"expected the runtime to start an environment within {timeout_s:.1f} s; it hung.")
    return code


def _ended_within(pid: int, timeout_s: float) -> bool:
    handle = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))
    finally:
        os.close(handle)
