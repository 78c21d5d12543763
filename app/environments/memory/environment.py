"""An environment that is pretended: files and processes in this process's memory, the rest of the contract for real."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from app.environments import archives
from app.environments.base import CommandResult, Forward, Origin, ResetProof, Route, Serve, Snapshot, Stats, Tags, Times
from app.environments.disk import disk_named
from app.environments.memory import snapshots
from app.environments.memory.commands import Running
from app.environments.memory.faults import Fault, Faults, Trouble
from app.environments.memory.files import FileSystem, Node, differences
from app.environments.memory.processes import Job, Killed, Machine, Process
from app.environments.memory.shell.calls import Exited, Program, which
from app.environments.memory.shell.interpreter import Shell
from app.environments.memory.shell.parser import Parser
from app.environments.memory.shell.tree import SyntaxFault
from app.environments.memory.stream import MemoryStream
from app.errors import EnvironmentFailed
from app.models.shell import Interactive, StatefulShell
from app.models.spec import EnvironmentSpec

DISK_BYTES = 1 << 30
"""What an environment may hold where the task does not say: it is this process's memory."""
_IN_COMMANDS = (Trouble.SLOW, Trouble.HANGS, Trouble.OUT_OF_MEMORY, Trouble.DIES, Trouble.DISK_FULL)


class MemoryEnvironment:
    """Of its limits, those of processes and disk hold; a program is a Python function (`Program`)."""

    def __init__(self, spec: EnvironmentSpec, programs: Mapping[str, Program], faults: Faults) -> None:
        self.id = uuid.uuid4().hex[:16]
        self.times = Times()
        self._spec, self._programs, self._faults = spec, programs, faults
        self._files = FileSystem(spec.resources.disk_bytes or DISK_BYTES)
        self._files.make_folder(spec.workdir, parents=True)
        self._machine = Machine(self._files, spec.resources.pids)
        self._origin = Origin.FRESH
        self._pristine: Node | None = None
        self._ending = threading.Lock()
        self._told: list[Callable[[], None]] = []

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "memory",
            "id": self.id,
            "image": self._spec.label,
            "origin": self._origin.value,
            "isolation": "pretended: nothing runs, nothing is stored outside of the worker",
            **self.times.describe(),
        }

    # --- Commands -------------------------------------------------------------------------------------------------

    def run(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float,
        stdin: bytes | None = None,
    ) -> CommandResult:
        running = self._running(["sh", "-c", command], stdin)
        shell = self._shell(running.process, cwd, env)
        if shell is None:
            running.process.end(126)
            return CommandResult(126, b"", f"{cwd}: no such folder\n".encode(), False, False, 0.0)
        return self.carry(running, lambda: shell.text(command), timeout_s, self.trouble(command))

    def carry(self, running: Running, body: Callable[[], int], timeout_s: float, fault: Fault | None) -> CommandResult:
        """The command's result, with the trouble that it is to meet. Raises: EnvironmentFailed."""
        try:
            return running.finish(body, timeout_s, fault)
        except EnvironmentFailed:
            if fault is not None and fault.trouble is Trouble.DIES:
                self.destroy()
            raise

    def trouble(self, command: str) -> Fault | None:
        fault = self._faults.due(command, *_IN_COMMANDS)
        if fault is not None and fault.trouble is Trouble.DISK_FULL:
            self._files.room_bytes = self._files.used_bytes
        return fault

    def _running(self, argv: list[str], stdin: bytes | None) -> Running:
        self.raise_if_gone()
        try:
            return Running(self._machine, argv, stdin)
        except Killed as error:
            raise EnvironmentFailed(f"environment {self.id} was destroyed.") from error

    def _shell(self, process: Process, cwd: str | None, env: Mapping[str, str] | None) -> Shell | None:
        """A new shell as this process; None where its folder is missing."""
        shell = Shell(process, self._programs, {**_variables(self._spec), **(env or {})})
        shell.folder = archives.absolute(cwd or self._spec.workdir) if cwd != "/" else "/"
        with suppress(OSError):
            if self._files.find(shell.folder).is_folder:
                return shell
        return None

    def shell(self, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> StatefulShell:
        self.raise_if_gone()
        return MemoryShell(self, cwd, env)

    def stream(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        tty: bool = False,
        rows: int = 24,
        columns: int = 80,
    ) -> Interactive:
        self.raise_if_gone()
        if tty:
            raise EnvironmentFailed("a memory environment has no terminals; expected tty=False.")
        process = Process(self._machine, Job(), list(argv), None)
        shell = self._shell(process, cwd, env)
        if shell is None or isinstance(which(shell, argv[0], shell.variables["PATH"]), int):
            process.end(127)
            raise EnvironmentFailed(f"cannot start {argv[0]}: no such program, or no folder {cwd}.")
        shell.lone = True
        return MemoryStream(self._machine, process, lambda: shell.program(list(argv), shell.environment()))

    # --- Files ----------------------------------------------------------------------------------------------------

    def put(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        path = archives.absolute(path)
        with self._storing(f"write {path}"):
            if self._faults.due(path, Trouble.DISK_FULL):
                self._files.room_bytes = self._files.used_bytes
            self._files.put(path, content, mode)

    def get(self, path: str) -> bytes:
        path = archives.absolute(path)
        with self._storing(f"read {path}"):
            if not self._files.exists(path) or self._files.find(path).is_folder:
                raise FileNotFoundError(f"no file {path} in environment {self.id}.")
            return bytes(self._files.find(path).content)

    def put_tree(self, archive: bytes, path: str) -> None:
        path = archives.absolute(path)
        archives.check(archive)
        with self._storing(f"unpack into {path}"):
            self._files.unpack(archive, path)

    def get_tree(self, path: str) -> bytes:
        path = archives.absolute(path)
        with self._storing(f"read {path}"):
            if not self._files.exists(path) or not self._files.find(path).is_folder:
                raise FileNotFoundError(f"no folder {path} in environment {self.id}.")
            return self._files.pack(path)

    @contextmanager
    def _storing(self, doing: str) -> Iterator[None]:
        self.raise_if_gone()
        try:
            with disk_named(f"cannot {doing}"):
                yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise EnvironmentFailed(f"cannot {doing} in environment {self.id}: {error}.") from error

    # --- Life -----------------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        self.raise_if_gone()
        return Stats(len(self._machine.of()), self._files.used_bytes, None, None, None)

    def forward(self, port: int, serve: Serve) -> Forward:
        raise EnvironmentFailed("a memory environment has no network: no port inside can lead to us.")

    def keep_as_pristine(self) -> None:
        """What a reset brings back is what is here now."""
        self._pristine = self._files.root.copy()

    def snapshot(self, tags: Tags) -> Snapshot:
        with self._files.lock:
            self.raise_if_gone()
            root = self._files.root.copy()
        if (told := root.children.get("proc")) is not None:
            told.children.clear()  # of processes
        return snapshots.keep(root, tags)

    def take_files(self, root: Node) -> None:
        """Have a copy of these, and no others."""
        self._files.restore(root)
        self._files.make_folder(self._spec.workdir, parents=True)

    def reset(self) -> ResetProof:
        """Kill all, compare every file with how it was, and put that back."""
        if self._machine.gone or self._pristine is None:
            return ResetProof(clean=False, left=("it was destroyed, or never finished",))
        self.times.phases.clear()  # what it cost to make it was the last attempt's
        with self.times.measure("reset"):
            living = self._machine.of()
            self._machine.kill(living)
            with self._machine.changed:
                if not self._machine.changed.wait_for(lambda: not self._machine.of(), 5):
                    return ResetProof(clean=False, left=("a process would not end",))
            added, changed = differences(self._pristine, self._files.root)
            self._files.restore(self._pristine)
            self._files.room_bytes = self._spec.resources.disk_bytes or DISK_BYTES
        self._origin, self.times.route = Origin.RECYCLED, Route.RECYCLED
        return ResetProof(clean=True, removed=added, restored=changed, killed=len(living))

    def adopt(self, tags: Tags) -> None:
        """From now on it is of another attempt. Raises: EnvironmentFailed: it is gone."""
        with self.times.handed_on():
            self.raise_if_gone()

    def destroy(self) -> None:
        with self._ending, nullcontext() if self._machine.gone else self.times.measure("teardown"):
            self._machine.end()

        for told in self._told:
            told()

    def when_gone(self, tell: Callable[[], None]) -> None:
        """Call `tell` after the end, at least once."""
        self._told.append(tell)

    def unpack_root(self, archive: bytes) -> None:
        """An image's files. Raises: SpecInvalid."""
        archives.check(archive)
        with self._storing("unpack the image"):
            self._files.unpack(archive, "/")

    def raise_if_gone(self) -> None:
        if self._machine.gone:
            raise EnvironmentFailed(f"environment {self.id} was destroyed.")

    # --- For the shell that remembers -----------------------------------------------------------------------------

    def begin(self, command: str, cwd: str | None, env: Mapping[str, str] | None) -> tuple[Running, Shell]:
        """A command under way and a new shell for it. Raises: EnvironmentFailed: no such folder."""
        running = self._running(["sh"], None)
        shell = self._shell(running.process, cwd, env)
        if shell is None:
            running.process.end(126)
            raise EnvironmentFailed(f"expected a folder for the shell, found none at {cwd}.")
        return running, shell


class MemoryShell:
    """One command at a time (a lock sees to it)."""

    def __init__(self, environment: MemoryEnvironment, cwd: str | None, env: Mapping[str, str] | None) -> None:
        self._environment, self._cwd, self._env = environment, cwd, env
        self._shell: Shell | None = None
        self._lock = threading.Lock()
        self._closed = False

    def run(self, command: str, *, timeout_s: float) -> CommandResult:
        with self._lock:
            if self._closed:
                raise EnvironmentFailed("this shell was closed.")
            running, shell = self._environment.begin(command, self._cwd, self._env)
            shell, self._shell = self._as(shell), None
            ended = True

            def body() -> int:
                nonlocal ended
                try:
                    code = shell.execute(Parser(command).whole())
                except SyntaxFault as fault:
                    shell.say(f"Syntax error: {fault}")
                    code = 2
                except Exited as exited:
                    return shell.farewell(exited.code)
                ended = False
                return code

            result = self._environment.carry(running, body, timeout_s, self._environment.trouble(command))
            if ended or result.exit_code is None:  # the next one has its folder and its exports
                self._cwd, self._env = shell.folder, shell.environment()
            else:
                self._shell = shell
            return result

    def _as(self, new: Shell) -> Shell:
        """The shell that there was, as the new process; else the new one."""
        if self._shell is None:
            return new
        self._shell.process, self._shell.pid = new.process, new.pid
        return self._shell

    def close(self) -> None:
        with self._lock:
            self._closed = True


def _variables(spec: EnvironmentSpec) -> dict[str, str]:
    folders = {"TESTS_DIR": "/tests", "LOGS_DIR": "/logs", "SOLUTION_DIR": "/solution"}
    home = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root", "LANG": "C.UTF-8", "WORKDIR": spec.workdir}
    return {**home, **folders, **spec.env}
