"""The session's client: runs commands, shells and streams, and moves files."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import BinaryIO

from app.environments.contract import Stats
from app.environments.session import protocol, transfer
from app.environments.session.commands import LongStreams, receive_result, result_after_loss, start
from app.environments.session.connection import Connect, ConnectionLost
from app.environments.session.connection_pool import ConnectionPool
from app.environments.session.protocol import KEEP_BYTES, FileListing, FrameKind, frame
from app.environments.session.shells import SessionProgram, ShellSession
from app.models.shell import CommandResult, OutputLogs

_QUICK_S = 30.0
"""Time limit of requests that take no time of their own."""


class SessionClient:
    """A client of one environment. Safe for many threads: each running command has a connection of its own.

    Raises: EnvironmentFailed, from every method, when the environment is gone or `close` was called.
    """

    def __init__(
        self,
        connect: Connect,
        *,
        label: str = "",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        ended: Callable[[], None] | None = None,
        bridged: bool = False,
    ) -> None:
        """`label` names the environment in messages; `cwd`, `env` and `user` are the defaults of every command.

        `ended` raises when the environment was ended for a reason, which overrides the error that is seen here.

        bridged: each connection is a process inside, which is not counted among the environment's.

        The helper's own environment (the image's) comes first, then `env`, then the command's.
        """
        self._pool = ConnectionPool(connect, label, ended)
        self.logs: OutputLogs | None = None
        """Destination of streams longer than their limit, while the command runs; leaves no trace inside."""
        self._bridged = bridged
        self._cwd = cwd
        self._user = user
        self._env = protocol.variables(env or {})

    def wait_ready(self, timeout_s: float) -> None:
        """Returns as soon as the helper answers; asks every millisecond."""
        self._pool.wait_ready(timeout_s)

    def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float,
        stdin: bytes | None = None,
        user: str | None = None,
        limit_bytes: int = KEEP_BYTES,
    ) -> CommandResult:
        """Runs a shell command (`str`, by /bin/sh), or a program with its arguments.

        At `timeout_s` everything that it started is killed. When it ends by itself, its background processes live on.
        `user`: `name`, `uid`, `name:group` or `uid:gid`. Exit code 126: it could not be started (no such folder, not
        executable), 127: no such program; stderr tells why.
        """
        begun = time.monotonic()
        argv, script = _argv(command)
        with LongStreams(self.logs, command) as streams:
            request = protocol.run(
                argv,
                script,
                cwd=cwd or self._cwd,
                user=user or self._user,
                env=self._variables(env),
                timeout_ms=protocol.milliseconds(timeout_s),
                limit_bytes=limit_bytes,
                stdin=stdin,
                log_bytes=streams.limit_bytes,
            )
            connection = self._pool.acquire()
            try:
                start(connection, request, timeout_s, more=protocol.follows(stdin))
                if protocol.follows(stdin):
                    transfer.send_pieces(connection, stdin or b"")
                result = receive_result(connection, limit_bytes, streams, begun=begun)
            except ConnectionLost as error:
                self._pool.discard(connection)
                return result_after_loss(self._pool, error, begun=begun)
            except BaseException:
                self._pool.discard(connection)
                raise
        self._pool.release(connection)
        return result

    def _variables(self, env: Mapping[str, str] | None) -> tuple[int, bytes]:
        if not env:
            return self._env
        count, packed = protocol.variables(env)
        return count + self._env[0], self._env[1] + packed

    def shell(
        self,
        *,
        program: str = "/bin/sh",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        limit_bytes: int = KEEP_BYTES,
    ) -> ShellSession:
        """Opens a shell with state. `program`: sh, dash, bash or busybox's ash. Raises: EnvironmentFailed: no shell."""
        request = protocol.shell_open(
            program, cwd=cwd or self._cwd, user=user or self._user, env=self._variables(env), limit_bytes=limit_bytes
        )
        return ShellSession(self._pool, request, limit_bytes, lambda: self.logs)

    def stream(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        tty: bool = False,
        rows: int = 24,
        columns: int = 80,
    ) -> SessionProgram:
        """Starts a program with input and output. Raises: EnvironmentFailed: also when it cannot be started."""
        request = protocol.stream_open(
            list(argv),
            cwd=cwd or self._cwd,
            user=user or self._user,
            env=self._variables(env),
            size=(rows, columns) if tty else None,
        )
        return SessionProgram(self._pool, request)

    def put(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Writes one file; parents are made. Raises: DiskFull; ValueError: `path` is not absolute."""
        transfer.put(self._pool, path, content, mode=mode)

    def get(self, path: str, *, limit_bytes: int = 256 << 20) -> bytes:
        """Reads one file. Raises: FileNotFoundError: no file there; EnvironmentFailed: it is larger than the limit."""
        return transfer.get(self._pool, FrameKind.GET, path, limit_bytes=limit_bytes)

    def put_tree(self, archive: bytes | BinaryIO, path: str) -> None:
        """Unpacks an uncompressed tar into the folder `path`, made if missing.

        Raises: SpecInvalid: no tar, or a member leads outside or is neither file, folder nor link; DiskFull.
        """
        transfer.put_tree(self._pool, path, archive)

    def get_tree(self, path: str, *, limit_bytes: int = 256 << 20) -> bytes:
        """Returns a tar of the contents of the folder `path`. Raises: FileNotFoundError."""
        return transfer.get(self._pool, FrameKind.GET_TREE, path, limit_bytes=limit_bytes)

    def list_files(self, path: str, *, limit_bytes: int = 512 << 20) -> FileListing:
        """Lists the files below the folder `path`, on its file system only. Raises: FileNotFoundError."""
        return transfer.list_files(self._pool, path, limit_bytes=limit_bytes)

    def stats(self) -> Stats:
        with self._pool.exchange(_QUICK_S) as connection:
            connection.send(frame(FrameKind.STATS))
            kind, payload = connection.receive(4096)
            try:
                if kind is FrameKind.OK:
                    stats = protocol.stats(payload)
                    ours = self._pool.count if self._bridged else 0
                    return replace(stats, processes=max(0, stats.processes - ours))
            except ValueError as error:
                raise ConnectionLost(f"found no statistics: {error}") from error
            raise ConnectionLost(f"expected statistics, found {kind.name}")

    def kill_all(self) -> int:
        """Kills every process of the environment but the helper; returns how many. Running commands end with 137."""
        with self._pool.exchange(_QUICK_S) as connection:
            connection.send(frame(FrameKind.KILL_ALL))
            kind, payload = connection.receive(4)
            if kind is not FrameKind.OK:
                raise ConnectionLost(f"expected a number, found {kind.name}")
            return int.from_bytes(payload, "little")

    def close(self) -> None:
        """Ends running work with EnvironmentFailed and kills it inside. Safe to call twice, from any thread."""
        self._pool.close()


def _argv(command: str | Sequence[str]) -> tuple[list[str], bytes | None]:
    if not isinstance(command, str):
        return list(command), None
    raw = protocol.encoded(command)
    if len(raw) < protocol.SCRIPT_BYTES:
        return ["/bin/sh", "-c", command], None
    return ["/bin/sh", "/proc/self/fd/250"], raw
