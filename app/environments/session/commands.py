"""Runs one command over a connection and turns the helper's reply into a result."""

from __future__ import annotations

import os
import shlex
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from app.environments.session import protocol
from app.environments.session.connection import ConnectionLost, HelperConnection
from app.environments.session.connection_pool import ConnectionPool
from app.environments.session.protocol import CHUNK_BYTES, FrameKind
from app.models.shell import LOGS_FULL, CommandResult, OutputLog, OutputLogs

AFTER_TIMEOUT_S = 60.0
"""Seconds of silence after a timeout until the helper counts as gone. It ends the command itself, and kills for at most
8 s of its own time, of which a fork bomb on a loaded host leaves it little."""
_KILLED_NOTE = b"\n[the command's supervisor was killed from inside the environment; its output is lost]\n"
_STARTING_S = 0.005
"""Seconds for which a command counts as starting; most have ended by then."""
_QUEUED_S = 0.25
"""Maximum seconds in the queue, whatever earlier commands do."""


class CommandQueue:
    """A context manager around the start of a command: a few at a time, first come first served.

    A host starts a command about as fast alone as among a hundred, and the other starts would delay its end. With many
    environments in one process, starts are queued, and each command ends soon after it began.

    places: commands that start at the same time while others wait. Twice as many may start before any has to wait,
    since waiting costs something, too.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._lock = threading.Lock()
        self._starting = 0
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if not self._waiting and self._starting < 2 * self._places:
                self._starting += 1
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        if not turn.acquire(timeout=_QUEUED_S):
            with self._lock:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                    self._starting += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._starting -= 1
            if self._waiting and self._starting < self._places:
                self._starting += 1
                self._waiting.popleft().release()


QUEUE = CommandQueue(2 * len(os.sched_getaffinity(0)))
"""Queue of this process."""


def start(connection: HelperConnection, request: bytes, timeout_s: float, *, more: bool = False) -> None:
    """Sends a command in its turn; returns once it ended or runs. more: input follows. Raises: ConnectionLost."""
    with QUEUE:
        connection.deadline = time.monotonic() + timeout_s + AFTER_TIMEOUT_S
        connection.send(request)
        if not more:
            connection.wait(_STARTING_S)


class LongStreams:
    """Logs parts of a command's streams that come before its result. The `with` block opens a log only if needed."""

    __slots__ = ("_command", "_logs", "_open", "_sizes", "limit_bytes")

    def __init__(self, logs: OutputLogs | None, command: str | Sequence[str]) -> None:
        self.limit_bytes = 0 if logs is None else logs.left_bytes
        self._logs = logs
        self._command = command
        self._open: dict[FrameKind, OutputLog] = {}
        self._sizes: dict[FrameKind, int] = {}

    def write(self, kind: FrameKind, piece: memoryview) -> None:
        """Raises: ConnectionLost: more than was asked for."""
        self._sizes[kind] = size = self._sizes.get(kind, 0) + len(piece)
        if self._logs is None or size > self.limit_bytes:
            raise ConnectionLost(f"expected at most {self.limit_bytes} bytes of {kind.name}, found {size}")
        if kind not in self._open:
            command = self._command if isinstance(self._command, str) else shlex.join(self._command)
            self._open[kind] = self._logs.open("stdout" if kind is FrameKind.OUT else "stderr", command)
        self._open[kind].write(piece)

    def note(self, kind: FrameKind, total_bytes: int) -> str:
        """Returns where to find the omitted part of a stream of that length."""
        if kind in self._open:
            return self._open[kind].location(total_bytes)
        return LOGS_FULL if self._logs is not None and not self.limit_bytes else ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(log.name for log in self._open.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for log in self._open.values():
            log.close()


def receive_result(
    connection: HelperConnection, limit_bytes: int, streams: LongStreams, *, begun: float
) -> CommandResult:
    """Receives a result. begun: monotonic. Raises: ConnectionLost: also for a reply that is no result."""
    most = max(protocol.result_limit(limit_bytes), CHUNK_BYTES)
    kind, payload = connection.receive(most)
    while kind in (FrameKind.OUT, FrameKind.ERR):
        streams.write(kind, payload)
        if time.monotonic() > connection.deadline:
            raise ConnectionLost("it comes to no end")
        kind, payload = connection.receive(most)
    if kind is not FrameKind.RESULT:
        raise ConnectionLost(f"expected a result, found {kind.name}")
    try:
        result = protocol.result(payload, limit_bytes, streams.note, duration_s=time.monotonic() - begun)
    except ValueError as error:
        raise ConnectionLost(f"found {error}") from error
    return replace(result, logs=streams.names) if streams.names else result


def result_after_loss(pool: ConnectionPool, error: ConnectionLost, *, begun: float) -> CommandResult:
    """Returns a result for a command that killed its own supervisor, if the helper still lives.

    Raises: EnvironmentFailed: the helper is gone, or the connection did not end: silence is no result.
    """
    if not error.ended or pool.closed or not pool.alive():
        raise pool.lost(error) from error
    return CommandResult(137, b"", _KILLED_NOTE, False, False, time.monotonic() - begun)
