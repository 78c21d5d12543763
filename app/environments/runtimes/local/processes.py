"""Finding and killing the processes of this host that carry a mark: a variable in their environment.

Children inherit it; who cleared it is still found as a child, or by the session.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass

_ROUNDS = 40
_SMALL = 64
"""More than these are stopped before they are killed, since they may grow as fast as they die."""


@dataclass(frozen=True, slots=True)
class Process:
    """A line of the process table."""

    pid: int
    state: str
    parent: int
    session: int
    marked: bool


def living(variable: str, value: str) -> list[int]:
    """The processes that have this mark, or descend from one that has; not the dead."""
    return [process.pid for process in _living(variable, value, set())]


def kill_marked(variable: str, value: str) -> bool:
    """Kill them until none is left; False when some do not end."""
    sessions: set[int] = set()
    for attempt in range(_ROUNDS):
        found = _living(variable, value, sessions)
        if not found:
            return True
        moving = [process.pid for process in found if process.state not in "Tt"]
        if moving and len(found) > _SMALL and attempt < _ROUNDS // 2:
            _send(moving, signal.SIGSTOP)
        else:
            _send([process.pid for process in found], signal.SIGKILL)
            time.sleep(0.002 * attempt)
    return False


def _living(variable: str, value: str, sessions: set[int]) -> list[Process]:
    """sessions: those seen before; new ones are added."""
    mark = f"{variable}={value}".encode()
    table = [found for name in os.listdir("/proc") if name.isdigit() and (found := _look(int(name), mark))]
    sessions |= {process.session for process in table if process.marked and process.session > 0}
    chosen = {process.pid for process in table if process.marked or process.session in sessions}
    while children := {process.pid for process in table if process.parent in chosen} - chosen:
        chosen |= children
    return [process for process in table if process.pid in chosen and process.state not in "ZX"]


def _send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _look(pid: int, mark: bytes) -> Process | None:
    """None when it has just ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if len(fields) < 4:
        return None
    return Process(pid, fields[0].decode(), int(fields[1]), int(fields[3]), _is_marked(pid, mark))


def _is_marked(pid: int, mark: bytes) -> bool:
    with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        return mark in file.read().split(b"\0")
    return False
