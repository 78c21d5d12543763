"""Finding and killing every process that a command started, also those that left its session.

A command is known by a variable in its environment, which children inherit; who cleared it is still found as a child,
by the session, or, where no other command ran meanwhile, as an orphan younger than the command.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from app.errors import EnvironmentFailed

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
    started: int  # clock ticks after boot
    mark: str  # of its command; "" when it has none, or hides it

    @property
    def dead(self) -> bool:
        return self.state in "ZX"


class ProcessView(Protocol):
    """Where processes are seen and signalled."""

    @property
    def init(self) -> int | None:
        """Who adopts this view's orphans; None when that is not ours to say."""
        ...

    def scan(self) -> list[Process]: ...

    def send(self, pids: Iterable[int], number: signal.Signals) -> None: ...


@dataclass
class Tree:
    """What is known of one command's processes, over several looks."""

    mark: str
    alone: bool  # no other command ran since this one began
    sessions: set[int] = field(default_factory=set)
    since: int | None = None

    def living(self, table: list[Process], init: int | None) -> list[Process]:
        """Those of `table` that belong to the command and are not dead."""
        found = {p.pid for p in table if p.mark == self.mark}
        self._learn([p for p in table if p.pid in found])
        found |= {p.pid for p in table if p.session in self.sessions or self._orphan(p, init)}
        while children := {p.pid for p in table if p.parent in found} - found:
            found |= children
        return [p for p in table if p.pid in found and not p.dead and p.pid != init]

    def _learn(self, marked: list[Process]) -> None:
        self.sessions |= {p.session for p in marked if p.session > 0}
        starts = [p.started for p in marked]
        self.since = min([*starts, *([] if self.since is None else [self.since])], default=None)

    def _orphan(self, process: Process, init: int | None) -> bool:
        return (
            self.alone
            and self.since is not None
            and init is not None
            and process.parent == init
            and not process.mark
            and process.started >= self.since
        )


def kill_tree(view: ProcessView, tree: Tree) -> bool:
    """Kill until a look finds nobody left; False when some would not die."""
    for attempt in range(_ROUNDS):
        living = tree.living(view.scan(), view.init)
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
    """This host's own process table; with `init`, only the pid namespace that this process began."""

    def __init__(self, init: int | None = None, variable: str = COMMAND) -> None:
        self._init = init
        self._variable = variable.encode() + b"="
        self._namespace = _namespace(init) if init is not None else None

    @property
    def init(self) -> int | None:
        return self._init

    @classmethod
    def of_container(cls, container_id: str, init: int) -> HostView | None:
        """The container's processes seen from here; None when its engine runs elsewhere or we may not look."""
        try:
            if os.geteuid() != 0 or container_id not in Path(f"/proc/{init}/cgroup").read_text():
                return None
            return cls(init)
        except OSError:
            return None

    def scan(self) -> list[Process]:
        pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
        found = (self._look(pid) for pid in pids if self._namespace is None or _namespace(pid) == self._namespace)
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


class ExecView:
    """A container's processes, seen by commands run in it: for an engine on another host.

    `run` takes an argv and gives its standard output. One `grep` without a fork looks at all processes, since the
    container may have reached its limit of processes.
    """

    init = 1
    _LOOK = 'exec grep -a -s -H -o -e "$1=[0-9a-f]*" -e ") [A-Za-z] [0-9].*" /proc/[0-9]*/stat /proc/[0-9]*/environ'

    def __init__(self, run: Callable[[list[str]], bytes]) -> None:
        self._run = run

    def scan(self) -> list[Process]:
        stats: dict[int, str] = {}
        marks: dict[int, str] = {}
        for line in self._run(["/bin/sh", "-c", self._LOOK, "sh", COMMAND]).decode("utf-8", "replace").splitlines():
            path, _, text = line.partition(":")
            match path.split("/"):
                case ["", "proc", pid, "stat"] if pid.isdigit():
                    stats[int(pid)] = text  # the last match: a process may put such text into its own name
                case ["", "proc", pid, "environ"] if pid.isdigit() and text.startswith(COMMAND + "="):
                    marks.setdefault(int(pid), text.partition("=")[2])
        if not stats:
            raise EnvironmentFailed("processes cannot be seen: expected `grep` and a free process in the environment.")
        found = (parse(pid, stat, marks.get(pid, "")) for pid, stat in stats.items())
        return [process for process in found if process is not None]

    def send(self, pids: Iterable[int], number: signal.Signals) -> None:
        name = number.name.removeprefix("SIG")
        self._run(["/bin/sh", "-c", f'kill -s {name} "$@" 2>/dev/null; :', "sh", *map(str, pids)])


def parse(pid: int, stat: str, mark: str) -> Process | None:
    """A process from /proc/PID/stat, or from its part after the name; None when it is not one."""
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 20:
        return None
    return Process(pid, fields[0], int(fields[1]), int(fields[3]), int(fields[19]), mark)


def _namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None
