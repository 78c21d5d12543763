"""Processes and folders of local environments: start, kill, copy, remove.

The mark is a variable in the environment of every process. Children inherit it; a process that cleared it is still
found as a child, or by its session.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.environments.contract import Stats
from app.environments.session.client import SessionClient
from app.environments.session.connection import listen_in, unix_connector
from app.environments.session.connection_pool import ConnectionPool
from app.environments.session.shells import SessionProgram, ShellSession
from app.errors import DiskFull, EnvironmentFailed
from app.host.disk import no_space
from app.models.shell import CommandResult

ENVIRONMENT = "_MF_ENVIRONMENT"
"""Variable that marks every process of one environment."""
OWNER = "owner.json"
"""File next to an environment's root folder that names its owner."""
_READY_S = 20.0
_END_S = 10.0
_ORPHAN_EXIT_S = 60
"""Seconds until the session of a vanished worker ends all that it started; a launcher or the sweeper is sooner."""
_SOCKET = "session"
_ROUNDS = 40
_SMALL = 64
"""Above this number, processes are stopped before they are killed, since they may grow as fast as they die."""
_YOUNG_S = 60.0
"""Age in seconds up to which a folder without an owner may be under construction."""


class HostSession(SessionClient):
    """The session helper as a plain process of this host. `within` maps a path of the task to one of this host.

    folder: holds the socket; its name marks processes to count, which the helper cannot tell from the host's others.
    """

    def __init__(
        self, program: Path, folder: Path, env: Mapping[str, str], *, cwd: str, within: Callable[[str], Path] = Path
    ) -> None:
        """Starts it. Raises: EnvironmentFailed."""
        super().__init__(unix_connector(folder / _SOCKET), label=folder.name, cwd=str(within(cwd)))
        self._program = program
        self._mark = folder.name
        self._within = within
        try:
            process = _start(program, folder, env)
        except OSError as error:
            raise EnvironmentFailed(f"no session can be started in {folder}: {error}.") from error
        self._end = weakref.finalize(self, _end_session, self._pool, process)  # also without `close`
        try:
            self.wait_ready(_READY_S)
        except BaseException:
            self.close()
            raise

    def run(self, command: str | Sequence[str], *, cwd: str | None = None, **options: Any) -> CommandResult:
        return super().run(command, cwd=self._folder(cwd), **options)

    def shell(self, *, cwd: str | None = None, **options: Any) -> ShellSession:
        return super().shell(cwd=self._folder(cwd), **options)

    def stream(self, argv: Sequence[str], *, cwd: str | None = None, **options: Any) -> SessionProgram:
        return super().stream(argv, cwd=self._folder(cwd), **options)

    def put(self, path: str, content: Any, *, mode: int = 0o644) -> None:
        super().put(str(self._within(path)), content, mode=mode)

    def get(self, path: str, **options: Any) -> bytes:
        return super().get(str(self._within(path)), **options)

    def put_tree(self, archive: Any, path: str) -> None:
        super().put_tree(archive, str(self._within(path)))

    def get_tree(self, path: str, **options: Any) -> bytes:
        return super().get_tree(str(self._within(path)), **options)

    def stats(self) -> Stats:
        pids = [process.pid for process in _marked(f"{ENVIRONMENT}={self._mark}", set())]
        return Stats(sum(not _runs(pid, self._program) for pid in pids), None, None, None)

    def close(self) -> None:
        """Ends it and all that its commands left. Safe to call twice."""
        self._end()

    def _folder(self, cwd: str | None) -> str | None:
        return cwd and str(self._within(cwd))


def _start(program: Path, folder: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with listen_in(folder, _SOCKET) as listening:
        number = listening.fileno()
        return subprocess.Popen(  # noqa: S603 (ours)
            [str(program), "--listen-fd", str(number), "--orphan-exit", str(_ORPHAN_EXIT_S)],
            cwd="/",
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(number,),
        )


def _end_session(pool: ConnectionPool, process: subprocess.Popen[bytes]) -> None:
    pool.close()
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_END_S)


def _runs(pid: int, program: Path) -> bool:
    try:
        return os.path.samefile(f"/proc/{pid}/exe", program)
    except OSError:  # it has just ended
        return True


@dataclass(frozen=True, slots=True)
class HostProcess:
    """A line of the process table."""

    pid: int
    state: str
    parent: int
    session: int
    marked: bool


def _kill_marked(mark: str) -> None:
    """Kills marked processes until none is left; after many rounds some may remain."""
    sessions: set[int] = set()
    for attempt in range(_ROUNDS):
        processes = _marked(mark, sessions)
        if not processes:
            return
        moving = [process.pid for process in processes if process.state not in "Tt"]
        stop = bool(moving) and len(processes) > _SMALL and attempt < _ROUNDS // 2
        for pid in moving if stop else [process.pid for process in processes]:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGSTOP if stop else signal.SIGKILL)
        time.sleep(0.0 if stop else 0.002 * attempt)


def _marked(mark: str, sessions: set[int]) -> list[HostProcess]:
    """Returns living processes with this mark, and descendants. sessions: seen before; new ones are added."""
    table = [entry for name in os.listdir("/proc") if name.isdigit() and (entry := _read(int(name), mark.encode()))]
    sessions |= {process.session for process in table if process.marked and process.session > 0}
    chosen = {process.pid for process in table if process.marked or process.session in sessions}
    while children := {process.pid for process in table if process.parent in chosen} - chosen:
        chosen |= children
    return [process for process in table if process.pid in chosen and process.state not in "ZX"]


def _read(pid: int, mark: bytes) -> HostProcess | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    if len(fields) < 4:
        return None
    marked = False
    with suppress(OSError):
        marked = mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return HostProcess(pid, fields[0].decode(), int(fields[1]), int(fields[3]), marked)


def copy_tree(tree: Path, root: Path, deadline: float) -> None:
    """Copies a prepared tree with modes, times and links. Raises: DiskFull, EnvironmentFailed."""
    left_s = max(0.1, deadline - time.monotonic())
    try:
        # The system's `cp` is faster than code here, and may share blocks.
        argv = ["/bin/cp", "-a", str(tree), str(root)]
        subprocess.run(argv, check=True, capture_output=True, timeout=left_s)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFailed(f"copying {tree} took longer than the environment's time.") from error
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode("utf-8", "replace").strip()
        if no_space(reason):
            raise DiskFull(f"no space for an environment: {reason}; free some under MEGAFLOW_HOME.") from error
        raise EnvironmentFailed(f"{tree} could not be copied: {reason}") from error


def owner_of(folder: Path) -> dict[str, Any]:
    """Reads the owner file; empty before it is written and after it was removed."""
    try:
        return dict(json.loads((folder / OWNER).read_text()))
    except (OSError, ValueError):
        return {}


def unowned_folders(home: Path) -> list[Path]:
    """Finds old folders without a readable owner: their maker, or their remover, was killed."""
    folders = []
    for folder in (home / "local").glob("*"):
        with suppress(OSError):  # being removed
            if "megaflow" not in owner_of(folder) and time.time() - folder.stat().st_mtime > _YOUNG_S:
                folders.append(folder)
    return folders


def remove_environment(folder: Path) -> None:
    """Kills the environment's marked processes and removes its folder. Raises: EnvironmentFailed: some remain."""
    _kill_marked(f"{ENVIRONMENT}={folder.name}")
    _remove(folder)


def _remove(folder: Path) -> None:
    """Removes a folder, also what its owner may not write to; the owner file last, since the sweeper needs it."""
    for _ in range(5):  # a dying process may still have written
        with suppress(OSError):  # another process removes it too; or it cannot be removed
            os.chmod(folder, 0o700)
            for path in [path for path in folder.iterdir() if path.name != OWNER]:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, onerror=_make_writable)
                else:
                    path.unlink()
            if {path.name for path in folder.iterdir()} <= {OWNER}:
                shutil.rmtree(folder, onerror=_make_writable)
        if not folder.exists():
            return
        time.sleep(0.05)
    raise EnvironmentFailed(f"expected {folder} to be gone, found some of it there yet; the sweeper goes on trying.")


def _make_writable(function: Callable[[str], object], path: str, _: object) -> None:
    with suppress(OSError):
        os.chmod(os.path.dirname(path), 0o700)
        os.chmod(path, 0o700)
        function(path)
