"""Finding and killing every process that a command started, also those that left its session.

A command is known by a variable in its environment, which children inherit; who cleared it is still found as a child,
or by the session.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

COMMAND = "_MF_COMMAND"
"""Variable that carries a command's mark."""
_ROUNDS = 40
_SMALL = 64
"""A tree larger than this is stopped before it is killed, since it may grow as fast as it dies."""


@dataclass(frozen=True, slots=True)
class Process:
    """A line of the process table, as seen by whoever looked."""

    pid: int
    state: str
    parent: int
    session: int
    mark: str  # of its command; "" when it has none, or hides it

    @property
    def dead(self) -> bool:
        return self.state in "ZX"


@dataclass
class Tree:
    """What is known of one command's processes, over several looks."""

    mark: str
    sessions: set[int] = field(default_factory=set)

    def living(self, table: list[Process]) -> list[Process]:
        """Those of `table` that belong to the command and are not dead."""
        found = {p.pid for p in table if p.mark == self.mark}
        self.sessions |= {p.session for p in table if p.pid in found and p.session > 0}
        found |= {p.pid for p in table if p.session in self.sessions}
        while children := {p.pid for p in table if p.parent in found} - found:
            found |= children
        return [p for p in table if p.pid in found and not p.dead]


def kill_tree(view: HostView, tree: Tree) -> bool:
    """Kill until a look finds nobody left; False when some would not die."""
    for attempt in range(_ROUNDS):
        living = tree.living(view.scan())
        if not living:
            return True
        moving = [p.pid for p in living if p.state not in "Tt"]
        if moving and len(living) > _SMALL and attempt < _ROUNDS // 2:
            view.send(moving, signal.SIGSTOP)
        else:
            view.send([p.pid for p in living], signal.SIGKILL)
            time.sleep(0.002 * attempt)
    return False


class HostView:
    """This host's own process table."""

    def __init__(self, variable: str = COMMAND) -> None:
        self._variable = variable.encode() + b"="

    def scan(self) -> list[Process]:
        found = (self._look(int(name)) for name in os.listdir("/proc") if name.isdigit())
        return [process for process in found if process is not None]

    def send(self, pids: Iterable[int], number: signal.Signals) -> None:
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def _look(self, pid: int) -> Process | None:
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            return None
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            environment = b""
        return parse(pid, stat.decode("utf-8", "replace"), self._mark(environment))

    def _mark(self, environment: bytes) -> str:
        for entry in environment.split(b"\0"):
            if entry.startswith(self._variable):
                return entry[len(self._variable) :].decode("ascii", "replace")
        return ""


def parse(pid: int, stat: str, mark: str) -> Process | None:
    """A process from /proc/PID/stat, or from its part after the name; None when it is not one."""
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 4:
        return None
    return Process(pid, fields[0], int(fields[1]), int(fields[3]), mark)
