"""One command in a container over the engine's exec stream: input, bounded output, deadline, exact exit code."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from app.environments.capture import captures
from app.environments.engine import Engine
from app.models.shell import OutputLogs

_AFTER_END_S = 1.0
"""A background process may keep the streams open; this long they are read on after the command itself has ended."""
_LOOK_S = 0.5
"""How often the engine is asked whether the command has ended while its streams stay open."""
_AFTER_KILL_S = 1.0


@dataclass
class Execution:
    """A started exec. `aborted` may be set, and `abort` called, from another thread."""

    engine: Engine
    exec_id: str
    stdin: bytes | None
    kill: Callable[[], None]  # ends the command's whole tree; called once, at the deadline
    logs: OutputLogs | None = None
    command: str = ""

    def __post_init__(self) -> None:
        self.stdout, self.stderr = captures(self.logs, self.command)
        self.timed_out = False
        self.aborted = threading.Event()
        self._socket: socket.socket | None = None
        self._unsent = memoryview(self.stdin or b"")
        self._frames = bytearray()

    def abort(self) -> None:
        """Let `finish` return at once."""
        self.aborted.set()
        connection = self._socket
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def finish(self, deadline: float) -> dict[str, Any]:
        """Carry the streams until the command has ended, or `deadline` (monotonic) killed it; the engine's record."""
        self._socket = self.engine.attach(self.exec_id)
        try:
            self._carry(self._socket, deadline)
        finally:
            self._socket.close()
            self.stdout.close()
            self.stderr.close()
        return self._await_end(deadline)

    def _carry(self, connection: socket.socket, deadline: float) -> None:
        connection.setblocking(False)
        until, next_look = deadline, time.monotonic() + _LOOK_S
        with selectors.DefaultSelector() as selector:
            selector.register(connection, self._interest(connection))
            while not self.aborted.is_set():
                now = time.monotonic()
                if now >= until:
                    if until < deadline or self.timed_out:  # enough was read after the end
                        return
                    self._time_out()
                    until = now + _AFTER_KILL_S
                elif now >= next_look:
                    next_look = now + _LOOK_S
                    if until == deadline and not self._record()["Running"]:
                        until = min(deadline, now + _AFTER_END_S)
                for _, events in selector.select(max(0.0, min(until, next_look) - time.monotonic())):
                    if events & selectors.EVENT_WRITE and self._send(connection):
                        selector.modify(connection, selectors.EVENT_READ)
                    if events & selectors.EVENT_READ and not self._receive(connection):
                        return

    def _interest(self, connection: socket.socket) -> int:
        if self.stdin is None:
            return selectors.EVENT_READ
        return selectors.EVENT_READ if self._send(connection) else selectors.EVENT_READ | selectors.EVENT_WRITE

    def _send(self, connection: socket.socket) -> bool:
        """Send what fits; True when nothing is left and the input was closed."""
        try:
            while self._unsent:
                self._unsent = self._unsent[connection.send(self._unsent[: 1 << 16]) :]
            connection.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            return False
        except OSError:  # the command ended without reading it all: its affair
            self._unsent = memoryview(b"")
        return True

    def _receive(self, connection: socket.socket) -> bool:
        try:
            data = connection.recv(1 << 18)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._take(data)
        return bool(data)

    def _take(self, data: bytes) -> None:
        """Sort the engine's frames (stream, three zeros, length, content) to the two streams."""
        self._frames += data
        while len(self._frames) >= 8:
            size = int.from_bytes(self._frames[4:8], "big")
            if len(self._frames) < 8 + size:
                return
            (self.stderr if self._frames[0] == 2 else self.stdout).feed(bytes(self._frames[8 : 8 + size]))
            del self._frames[: 8 + size]

    def _await_end(self, deadline: float) -> dict[str, Any]:
        """The engine's record once the command has ended; it may have closed its streams long before."""
        pause_s, until = 0.005, deadline
        while True:
            record = self._record()
            if not record["Running"] or self.aborted.is_set():
                return record
            if time.monotonic() >= until:
                if self.timed_out:
                    return record
                self._time_out()
                until = time.monotonic() + _AFTER_KILL_S
            time.sleep(pause_s)
            pause_s = min(0.2, pause_s * 1.5)

    def _time_out(self) -> None:
        self.timed_out = True
        self.kill()

    def _record(self) -> dict[str, Any]:
        record: dict[str, Any] = self.engine.api.exec_inspect(self.exec_id)
        return record
