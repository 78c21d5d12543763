"""Runs one program and ends every process of it. Started by its path, isolated; imports nothing of MegaFlow.

    python -I -S supervisor.py CONTROL STATUS GRACE_S PROGRAM ARGUMENT...

CONTROL and STATUS are numbers of inherited pipes. A byte on CONTROL, or its end (the parent died), means stop:
SIGTERM to the program's process group, SIGKILL after GRACE_S to everything. When the program and all that it started
are gone, one line is on STATUS: `ended CODE` (negative for a signal), or `failed WHY` when it could not be started.

As the subreaper it is the parent of whatever the program orphans, in whichever session or group that is, so that its
descendants are all there is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

_SET_CHILD_SUBREAPER = 36
_REAP_S = 1.0
"""Orphans that ended are waited for this often while the program runs."""
_GIVE_UP_S = 20.0
"""What does not die of SIGKILL by then hangs in the kernel."""
_LOOK_S = 0.005


class ChildProgram:
    """The program. `code` is None while it runs."""

    def __init__(self, argv: list[str]) -> None:
        """In a session of its own, with signals as every program expects them. Raises: OSError."""
        ours = (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self.pid = os.posix_spawnp(argv[0], argv, dict(os.environ), setsid=True, setsigdef=ours)
        self.code: int | None = None

    def reap(self) -> None:
        """Wait for all that has ended, the program or an orphan of it."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.code = os.waitstatus_to_exitcode(status)

    def await_end(self, controls: list[int]) -> None:
        """Until it has ended, or we are told to stop."""
        ending = os.pidfd_open(self.pid)
        try:
            look = select.poll()  # `select` knows no number above 1023, and a worker may have more files open
            for number in (*controls, ending):
                look.register(number, select.POLLIN)  # its end is told in any case
            while self.code is None:
                ready = [number for number, _ in look.poll(_REAP_S * 1000)]
                self.reap()
                if ready and ready != [ending]:
                    return
        finally:
            os.close(ending)

    def stop(self, grace_s: float) -> None:
        """Ask it to end, and wait this long."""
        if self.code is None:
            _send(-self.pid, signal.SIGTERM)
        until = time.monotonic() + grace_s
        while self.code is None and time.monotonic() < until:
            time.sleep(_LOOK_S)
            self.reap()

    def kill_all(self) -> None:
        """Kill whatever descends from us. All are stopped first, else one could outrun us by starting others."""
        until = time.monotonic() + _GIVE_UP_S
        stopped: set[int] = set()
        while time.monotonic() < until:
            self.reap()
            found = _descendants()
            if not found:
                return
            if fresh := found - stopped:
                for pid in fresh:
                    _send(pid, signal.SIGSTOP)
                stopped |= fresh
                continue
            for pid in found:
                _send(pid, signal.SIGKILL)
            time.sleep(_LOOK_S)


def _descendants() -> set[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (parent := _parent(name)) is not None:
            children.setdefault(parent, []).append(int(name))
    found: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.update(below)
        waiting += below
    return found


def _parent(name: str) -> int | None:
    """Of a process that lives, or has ended and still has to be waited for."""
    try:
        with open(f"/proc/{name}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def main(control: int, status: int, grace_s: float, argv: list[str]) -> None:
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2:  # what else we were given, such as a lock, is held as long as we live, and by nobody else
            with contextlib.suppress(OSError):  # the listing's own
                os.set_inheritable(number, False)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    told, telling = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.write(telling, b"s"))  # as a stop: nobody else would clean up
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        kept = ChildProgram(argv)
    except OSError as error:
        os.write(status, f"failed {error}\n".encode())
        return
    try:
        kept.await_end([control, told])
        kept.stop(grace_s)
    finally:
        kept.kill_all()
    os.write(status, f"ended {kept.code}\n".encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
