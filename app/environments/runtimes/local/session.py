"""The session helper as a plain process of this host: started for one folder, ended with all that its commands left."""

from __future__ import annotations

import os
import socket
import subprocess
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from app.environments.session import SessionClient, SessionProgram, SessionStats, ShellSession, unix_connector
from app.errors import EnvironmentFailed
from app.models.shell import CommandResult, OutputLogs

_READY_S = 20.0
_END_S = 10.0
_ORPHAN_EXIT_S = 60
"""After its worker has vanished, it ends all that it started after this time; a launcher or sweeper is sooner."""
_SOCKET = "session"


class HostSession:
    """Commands and files below one folder. `within` says where a path of the task lies; `folder` holds the socket.

    count: how many processes the environment has; the helper cannot tell them from the host's others.
    """

    def __init__(
        self,
        program: Path,
        folder: Path,
        env: Mapping[str, str],
        *,
        cwd: str,
        within: Callable[[str], Path] = Path,
        count: Callable[[], int] = lambda: 0,
    ) -> None:
        """Start it. Raises: EnvironmentFailed."""
        self._within = within
        self._count = count
        self._cwd = cwd
        try:
            self._process = _started(program, folder, env)
        except OSError as error:
            raise EnvironmentFailed(f"no session can be started in {folder}: {error}.") from error
        self._client = SessionClient(unix_connector(folder / _SOCKET), label=folder.name)
        self._end = weakref.finalize(self, _ended, self._client, self._process)  # also without `close`
        try:
            self._client.wait_ready(_READY_S)
        except BaseException:
            self.close()
            raise

    @property
    def logs(self) -> OutputLogs | None:
        """Where all of a command's long output goes."""
        return self._client.logs

    @logs.setter
    def logs(self, value: OutputLogs | None) -> None:
        self._client.logs = value

    def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float,
        stdin: bytes | None = None,
    ) -> CommandResult:
        return self._client.run(command, cwd=self._folder(cwd), env=env, timeout_s=timeout_s, stdin=stdin)

    def shell(self, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> ShellSession:
        return self._client.shell(cwd=self._folder(cwd), env=env)

    def stream(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        tty: bool = False,
        rows: int = 24,
        columns: int = 80,
    ) -> SessionProgram:
        return self._client.stream(argv, cwd=self._folder(cwd), env=env, tty=tty, rows=rows, columns=columns)

    def put(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        self._client.put(str(self._within(path)), content, mode=mode)

    def get(self, path: str) -> bytes:
        return self._client.get(str(self._within(path)))

    def put_tree(self, archive: bytes, path: str) -> None:
        self._client.put_tree(archive, str(self._within(path)))

    def get_tree(self, path: str) -> bytes:
        return self._client.get_tree(str(self._within(path)))

    def stats(self) -> SessionStats:
        return SessionStats(self._count(), None, None, None, None)

    def close(self) -> None:
        """End it and all that its commands left. Safe to call twice."""
        self._end()

    def _folder(self, cwd: str | None) -> str:
        return str(self._within(cwd or self._cwd))


def _ended(client: SessionClient, process: subprocess.Popen[bytes]) -> None:
    client.close()
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_END_S)


def _started(program: Path, folder: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        place = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            listening.bind(f"/proc/self/fd/{place}/{_SOCKET}")  # a socket's name has 107 bytes at most
        finally:
            os.close(place)
        os.chmod(folder / _SOCKET, 0o600)
        listening.listen(128)
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
