"""The inside of a container without a helper: an exec for each command, the engine's archives for files.

Slow (20 to 50 ms for each command), and enough: for an engine of another architecture, or a host without a compiler.
"""

from __future__ import annotations

import posixpath
import tarfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import structlog

from app.environments import archives
from app.environments.engine import Engine, missing
from app.environments.execution import Execution
from app.environments.processes import COMMAND, ExecView, HostView, ProcessView, Tree, kill_tree
from app.environments.remembering import RememberingShell
from app.environments.session import SessionStats
from app.environments.ways.exec_stream import ExecInteractive
from app.errors import EnvironmentFailed
from app.models.shell import CommandResult, Interactive, OutputLogs, StatefulShell

log = structlog.get_logger()

_LIMIT_BYTES = 256 << 20
_COMMAND_LIMIT_BYTES = 100_000
"""The kernel refuses a single argument of 128 KiB; a longer command becomes a script."""
_ENGINE_ONLY = ("/dev", "/proc", "/sys")
_AS_IF_ALL_DIED = (None, 137)
"""Exit codes of a command that was killed with its container, among others."""
_DYING_S = 5.0
"""So long the engine may take to note that a container has ended whose processes are dead."""
_OWN_PROCESSES = 2
"""The engine's init and the sleeper."""
_SIZED = ["/bin/sh", "-c", 'stty rows "$0" cols "$1" 2>/dev/null; shift; exec "$@"']
"""The engine gives a terminal its size only after the program has begun to look at it."""
_MEMORY = "for f in /sys/fs/cgroup/memory/memory.oom_control /sys/fs/cgroup/memory.events; do cat $f 2>/dev/null; done"


class ExecSession:
    """A running container whose first process sleeps. Safe for many threads."""

    def __init__(self, engine: Engine, container_id: str, *, cwd: str) -> None:
        self._engine = engine
        self._id = container_id
        self._cwd = cwd
        self._lock = threading.Lock()
        self._running: dict[str, Execution] = {}
        self._streams: list[ExecInteractive] = []
        self._started = 0  # commands so far: tells whether one ran alone
        self._view: ProcessView | None = None
        self._closed = False
        self.logs: OutputLogs | None = None

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
        begun = time.monotonic()
        mark = uuid.uuid4().hex
        with self._script(command) as argv, self._engine_says("run a command"):
            variables = {**(env or {}), COMMAND: mark}
            exec_id = self._engine.api.exec_create(
                self._id, argv, stdin=stdin is not None, environment=variables, workdir=cwd or self._cwd
            )["Id"]
            with self._registered(mark, exec_id, stdin, command) as execution:
                record = execution.finish(begun + timeout_s)
        return self._result(execution, record["ExitCode"], started=bool(record["Pid"]), begun=begun)

    def _result(self, execution: Execution, code: int | None, *, started: bool, begun: float) -> CommandResult:
        self._raise_if_closed()
        out, err = execution.stdout, execution.stderr
        never_started = code in (126, 127) and not started and not execution.timed_out
        if never_started or (code in _AS_IF_ALL_DIED and not execution.timed_out):
            self._raise_if_dead()
        if never_started:  # the engine's reason came over the stream: no such folder, no shell
            out, err = err, out
        return CommandResult(
            exit_code=None if execution.timed_out else code,
            stdout=out.content(),
            stderr=err.content(),
            timed_out=execution.timed_out,
            truncated=out.truncated or err.truncated,
            duration_s=time.monotonic() - begun,
            logs=out.log_names + err.log_names,
        )

    @contextmanager
    def _registered(self, mark: str, exec_id: str, stdin: bytes | None, command: str) -> Iterator[Execution]:
        with self._lock:
            self._started += 1
            number, others = self._started, len(self._running)

        def kill() -> None:
            tree = Tree(mark, alone=others == 0 and number == self._started)
            if not kill_tree(self._processes(), tree):
                log.warning("environment.kill_incomplete", environment=self._id)

        execution = Execution(self._engine, exec_id, stdin, kill, self.logs, command)
        with self._lock:
            self._running[mark] = execution
        if self._closed:
            execution.abort()
        try:
            yield execution
        finally:
            with self._lock:
                del self._running[mark]

    @contextmanager
    def _script(self, command: str) -> Iterator[list[str]]:
        """The argv for `command`; one too long for an argument is put into a file for as long as it runs."""
        if len(command.encode()) < _COMMAND_LIMIT_BYTES:
            yield ["/bin/sh", "-c", command]
            return
        path = f"/tmp/.command-{uuid.uuid4().hex}"
        self.put(path, command.encode(), mode=0o755)
        try:
            yield ["/bin/sh", path]
        finally:
            self._quiet(["rm", "-f", path])

    def shell(self, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> StatefulShell:
        return RememberingShell(self.run, "/tmp", cwd=cwd, env=env)

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
        mark = uuid.uuid4().hex
        if not self._quiet(["/bin/sh", "-c", 'command -v "$0"', argv[0]]):
            raise EnvironmentFailed(f"cannot start {argv[0]} in environment {self._id[:12]}: no such program.")
        with self._engine_says(f"start {argv[0]}"):
            exec_id = self._engine.api.exec_create(
                self._id,
                [*_SIZED, str(rows), str(columns), *argv] if tty else list(argv),
                stdin=True,
                tty=tty,
                environment={**(env or {}), COMMAND: mark},
                workdir=cwd or self._cwd,
            )["Id"]
            stream = ExecInteractive(self._engine, exec_id, tty=tty, mark=mark, view=self._processes)
        with self._lock:
            self._streams = [*(known for known in self._streams if not known.closed), stream]
        return stream

    # --- Files ----------------------------------------------------------------------------------------------------

    def put(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        self._put_archive("/", archives.of_file(_on_disk(path), content, mode=mode), f"write {path}")

    def put_tree(self, archive: bytes, path: str) -> None:
        archives.check(archive)
        folder = _on_disk(path)
        try:
            self._put_archive(folder, archive, f"unpack into {path}")
        except EnvironmentFailed as error:
            if not missing(error) or self._closed:
                raise
            self._put_archive("/", archives.of_folder(folder), f"make {path}")
            self._put_archive(folder, archive, f"unpack into {path}")

    def _put_archive(self, folder: str, archive: bytes, doing: str) -> None:
        with self._engine_says(doing):
            self._engine.api.put_archive(self._id, folder, archive)

    def get(self, path: str) -> bytes:
        where = _on_disk(path)
        for _ in range(16):
            found = self._get_archive(where, f"read {path}", path, folders=False)
            member, content = archives.only_member(found) if found else (tarfile.TarInfo(path), b"")
            if not found or not member.issym():
                break
            where = archives.absolute(posixpath.join(posixpath.dirname(where), member.linkname))
        if not found or not member.isreg():
            raise FileNotFoundError(f"expected a file at {path} in environment {self._id[:12]}, found something else.")
        return content

    def get_tree(self, path: str) -> bytes:
        where = _on_disk(path)
        return archives.below(self._get_archive(where, f"read {path}", path, folders=True))

    def _get_archive(self, where: str, doing: str, path: str, *, folders: bool) -> bytes:
        """What the engine gives; nothing for a folder when none is wanted: its archive holds all that is below it."""
        try:
            with self._engine_says(doing):
                chunks, about = self._engine.api.get_archive(self._id, where)
                if bool(about["mode"] & (1 << 31)) is not folders:
                    chunks.close()
                    if folders:
                        raise FileNotFoundError(f"expected a folder at {path}, found a file.")
                    return b""
                return _bounded(chunks, f"read {path}")
        except EnvironmentFailed as error:
            if missing(error) and "No such container" not in str(error):
                raise FileNotFoundError(f"no file {path} in environment {self._id[:12]}.") from error
            raise

    # --- The whole ------------------------------------------------------------------------------------------------

    def stats(self) -> SessionStats:
        """Processes and out-of-memory kills; what else is used is not asked for."""
        count = sum(not process.dead for process in self._processes().scan())
        kills = None
        for line in self._quiet(["/bin/sh", "-c", _MEMORY]).splitlines():
            if line.startswith(b"oom_kill "):
                kills = int(line.split()[1])
        return SessionStats(max(0, count - _OWN_PROCESSES), None, None, None, kills)

    def close(self) -> None:
        self._closed = True
        with self._lock:
            running, streams = list(self._running.values()), self._streams
            self._streams = []
        for execution in running:
            execution.abort()
        for stream in streams:
            stream.abandon()

    def _processes(self) -> ProcessView:
        if self._view is None:
            with self._engine_says("look at its processes"):
                init = self._engine.api.inspect_container(self._id)["State"]["Pid"]
            self._view = HostView.of_container(self._id, init) or ExecView(self._quiet)
        return self._view

    def _quiet(self, argv: list[str]) -> bytes:
        """Standard output of a command of ours, run as root and not counted as the task's."""
        with self._engine_says("look inside"):
            exec_id = self._engine.api.exec_create(self._id, argv, user="0", workdir="/")["Id"]
            execution = Execution(self._engine, exec_id, None, lambda: None)
            execution.finish(time.monotonic() + 30.0)
        return execution.stdout.content()

    @contextmanager
    def _engine_says(self, doing: str) -> Iterator[None]:
        """Raises: EnvironmentFailed, DiskFull, EngineUnavailable."""
        self._raise_if_closed()
        try:
            with self._engine.named(f"cannot {doing} in environment {self._id[:12]}", EnvironmentFailed):
                yield
        except FileNotFoundError:
            raise
        except OSError as error:
            self._raise_if_closed()
            raise EnvironmentFailed(f"cannot {doing} in environment {self._id[:12]}: {error}") from error

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise EnvironmentFailed(f"environment {self._id[:12]} was destroyed.")

    def _raise_if_dead(self) -> None:
        """Tell a command that died from a container that did: the engine hears of a command's end first."""
        with self._engine_says("look whether it lives"):
            give_up = time.monotonic() + _DYING_S
            while not self._answers():
                state = self._engine.api.inspect_container(self._id)["State"]
                if not state["Running"]:
                    raise EnvironmentFailed(f"environment {self._id[:12]} is not running any more")
                if time.monotonic() > give_up:  # full of processes, then
                    return
                time.sleep(0.05)

    def _answers(self) -> bool:
        """Whether a process can be started inside: not once its first process is dead, whatever the engine believes."""
        try:
            return self._quiet(["/bin/sh", "-c", "echo here"]) == b"here\n"
        except EnvironmentFailed as error:
            if missing(error):
                raise
            return False


def _bounded(chunks: Iterator[bytes], doing: str) -> bytes:
    found = bytearray()
    for chunk in chunks:
        found += chunk
        if len(found) > _LIMIT_BYTES + (1 << 20):
            raise EnvironmentFailed(f"cannot {doing}: expected at most {_LIMIT_BYTES} bytes, found more.")
    return bytes(found)


def _on_disk(path: str) -> str:
    clean = archives.absolute(path)
    if clean.startswith(tuple(f"{mount}/" for mount in _ENGINE_ONLY)):
        raise EnvironmentFailed(f"expected a path on the environment's disk, found {path}; use a command for it.")
    return clean
