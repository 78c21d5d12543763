"""Runs one program and ends every process of it. Started by its path, isolated; imports nothing of MegaFlow.

    python -I -S supervisor.py CONTROL STATUS GRACE_S PROGRAM ARGUMENT...

CONTROL and STATUS are numbers of inherited pipes. A byte on CONTROL, or its end (the parent died), means stop: SIGTERM
to the program's process group, then SIGKILL after GRACE_S to everything. When the program and all its children are
gone, it writes one line to STATUS: `ended CODE` (negative for a signal), or `failed WHY` if it could not start.

As a subreaper it becomes the parent of the program's orphans, in any session or group. So its own descendants are all
processes of the program.
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
"""Interval for reaping orphans that ended while the program runs."""
_GIVE_UP_S = 20.0
"""Time limit for SIGKILL; a process that lives longer hangs in the kernel."""
_LOOK_S = 0.005


class ChildProgram:
    """The supervised program. `code` is None while it runs."""

    def __init__(self, argv: list[str]) -> None:
        """Starts it in its own session, with default signal handlers as programs expect. Raises: OSError."""
        default_signals = (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self.pid = os.posix_spawnp(argv[0], argv, dict(os.environ), setsid=True, setsigdef=default_signals)
        self.code: int | None = None

    def reap(self) -> None:
        """Reaps all processes that have ended, the program or an orphan of it."""
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
        """Waits until it has ended, or a stop is requested."""
        ending = os.pidfd_open(self.pid)
        try:
            look = select.poll()  # `select` supports no number above 1023, and a worker may have more files open
            for number in (*controls, ending):
                look.register(number, select.POLLIN)  # the end of a pipe is reported in any case
            while self.code is None:
                ready = [number for number, _ in look.poll(_REAP_S * 1000)]
                self.reap()
                if ready and ready != [ending]:
                    return
        finally:
            os.close(ending)

    def stop(self, grace_s: float) -> None:
        """Sends SIGTERM, and waits this long."""
        if self.code is None:
            _send(-self.pid, signal.SIGTERM)
        until = time.monotonic() + grace_s
        while self.code is None and time.monotonic() < until:
            time.sleep(_LOOK_S)
            self.reap()

    def kill_all(self) -> None:
        """Kills all descendants. All are stopped first, else one could start new ones faster than they are killed."""
        until = time.monotonic() + _GIVE_UP_S
        stopped: set[int] = set()
        while time.monotonic() < until:
            self.reap()
            pids = _descendants()
            if not pids:
                return
            if fresh := pids - stopped:
                for pid in fresh:
                    _send(pid, signal.SIGSTOP)
                stopped |= fresh
                continue
            for pid in pids:
                _send(pid, signal.SIGKILL)
            time.sleep(_LOOK_S)


def _descendants() -> set[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (parent := _parent(name)) is not None:
            children.setdefault(parent, []).append(int(name))
    pids: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        pids.update(below)
        waiting += below
    return pids


def _parent(name: str) -> int | None:
    """Returns the parent of a process that lives, or has ended and is not reaped yet."""
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
        if number > 2:  # other inherited files, such as a lock, are held while this process lives, and by no child
            with contextlib.suppress(OSError):  # the file of the listing itself
                os.set_inheritable(number, False)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    stop_reader, stop_writer = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.write(stop_writer, b"s"))  # a stop: nothing else would clean up
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        program = ChildProgram(argv)
    except OSError as error:
        os.write(status, f"failed {error}\n".encode())
        return
    try:
        program.await_end([control, stop_reader])
        program.stop(grace_s)
    finally:
        program.kill_all()
    os.write(status, f"ended {program.code}\n".encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
