"""A port inside by a small program inside (`relay.c`), whose connections come over its input and output.

For environments whose network this worker cannot enter. What comes from there is believed no further than its bounds.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

import structlog

from app.environments.contract import Serve
from app.errors import EnvironmentFailed
from app.models.shell import InteractiveProgram

log = structlog.get_logger()

MOST = 64  # as the relay's
WINDOW_BYTES = 256 << 10
_PIECE_BYTES = 32 << 10
_HEAD = struct.Struct("<cxHI")
_READY_S = 30.0

Say = Callable[[bytes, int, bytes], None]


class BadRelay(Exception):
    """What came is nothing that a relay says."""


class _Frames:
    """Frames of the relay's output."""

    def __init__(self, program: InteractiveProgram) -> None:
        self._program = program
        self._kept = bytearray()

    def next(self, until: float | None = None) -> tuple[bytes, int, bytes]:
        """Kind, connection, payload. Raises: EOFError; BadRelay; EnvironmentFailed."""
        head = self._take(_HEAD.size, until)
        kind, number, size = _HEAD.unpack(head)
        if size > _PIECE_BYTES or number >= MOST:
            self._kept[:0] = head
            raise BadRelay(self._said())
        return kind, number, self._take(size, until)

    def _take(self, size: int, until: float | None) -> bytes:
        while len(self._kept) < size:
            data = self._program.read(None if until is None else max(0.0, until - time.monotonic()))
            if not data:
                raise EOFError(self._said())
            self._kept += data
        taken = bytes(self._kept[:size])
        del self._kept[:size]
        return taken

    def _said(self) -> str:
        """What came and was no frame, for a person."""
        return bytes(self._kept[:200]).decode("utf-8", "replace") or "nothing"


class _Line:
    """One connection: a pair of sockets, one for whoever serves it, and two threads that carry."""

    def __init__(self, number: int, serve: Serve, say: Say, forget: Callable[[int], None]) -> None:
        self._number = number
        self._serve = serve
        self._say = say
        self._forget = forget
        self._served, self._ours = socket.socketpair()
        self._coming: SimpleQueue[bytes | None] = SimpleQueue()
        self._owed = 0  # bytes that came and were not passed on yet
        self._credit = WINDOW_BYTES
        self._changed = threading.Condition()
        self._broken = False
        self.ended = self.over = False  # here, and inside: its number is free when both are
        self._threads = [
            threading.Thread(target=work, name="forward-carry", daemon=True) for work in (self._inwards, self._outwards)
        ]
        for thread in self._threads:
            thread.start()
        threading.Thread(target=self._attend, name="forward-serve", daemon=True).start()

    def came(self, data: bytes) -> None:
        """Raises: BadRelay: more than it may send."""
        with self._changed:
            self._owed += len(data)
            if self._owed > WINDOW_BYTES:
                raise BadRelay("more bytes than it had credit for")
        self._coming.put(data)

    def came_all(self) -> None:
        self._coming.put(None)

    def credited(self, size: int) -> None:
        with self._changed:
            self._credit += size
            self._changed.notify_all()

    def broke(self) -> None:
        """Nobody is inside any more: whoever serves finds the connection shut."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()
        self._coming.put(None)
        with suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)

    def _attend(self) -> None:
        try:
            self._serve(self._served)
        except OSError as error:
            log.debug("forward.connection_broken", error=str(error))
        finally:
            self._served.close()  # what it wrote last is still read from our end
            self._threads[1].join()
            self._coming.put(None)
            self._threads[0].join()
            self._ours.close()
            self._forget(self._number)

    def _inwards(self) -> None:
        """To whoever serves, what the relay sent."""
        with suppress(OSError):  # it is served no more
            while (data := self._coming.get()) is not None:
                self._ours.sendall(data)
                with self._changed:
                    self._owed -= len(data)
                self._say(b"C", self._number, struct.pack("<I", len(data)))
            self._ours.shutdown(socket.SHUT_WR)

    def _outwards(self) -> None:
        """To the relay, what whoever serves wrote."""
        while (most := self._allowed()) > 0:
            try:
                data = self._ours.recv(most)
            except OSError:
                return
            if not data:
                self._say(b"E", self._number, b"")
                return
            with self._changed:
                self._credit -= len(data)
            self._say(b"D", self._number, data)

    def _allowed(self) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._credit > 0 or self._broken)
            return 0 if self._broken else min(self._credit, _PIECE_BYTES)


class Carried:
    """A `Forward` by way of a running relay, which it ends."""

    def __init__(self, program: InteractiveProgram, serve: Serve) -> None:
        self._program = program
        self._frames = _Frames(program)
        self._serve = serve
        self._lines: dict[int, _Line] = {}
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._closed = False
        self.port = self._ready()
        threading.Thread(target=self._listen, name="forward-relay", daemon=True).start()

    def _ready(self) -> int:
        try:
            kind, _, payload = self._frames.next(time.monotonic() + _READY_S)
            if kind != b"R" or len(payload) != 2:
                raise BadRelay(f"{kind!r} before it was ready")
        except (EOFError, BadRelay) as error:
            self._program.close()
            raise EnvironmentFailed(
                f"expected the relay of ports to start inside and to listen, found: {error}; is the port taken, or is"
                " the environment of another architecture than its worker?"
            ) from None
        except BaseException:
            self._program.close()
            raise
        return int.from_bytes(payload, "little")

    def close(self) -> None:
        """Take no more connections and end those there are. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            lines = list(self._lines.values())
        self._program.close()
        for line in lines:
            line.broke()

    def _listen(self) -> None:
        try:
            while True:
                self._heard(*self._frames.next())
        except (EOFError, EnvironmentFailed) as error:
            log.debug("forward.relay_ended", port=self.port, reason=str(error))
        except BadRelay as error:
            log.warning("forward.relay_refused", port=self.port, reason=str(error))
        finally:
            self.close()

    def _heard(self, kind: bytes, number: int, payload: bytes) -> None:
        """Raises: BadRelay."""
        with self._lock:
            line = self._lines.get(number)
            if kind == b"O" and line is None:
                if not self._closed:
                    self._lines[number] = _Line(number, self._serve, self._say, self._forget)
                return
            if kind == b"X" and line is not None:
                line.over = True
                self._free(number, line)
        match kind:
            case _ if line is None:
                raise BadRelay(f"{kind!r} of a connection that there is not")
            case b"D":
                line.came(payload)
            case b"E":
                line.came_all()
            case b"C" if len(payload) == 4:
                line.credited(int.from_bytes(payload, "little"))
            case b"X":
                line.broke()
            case _:
                raise BadRelay(f"{kind!r} is nothing that it says")

    def _say(self, kind: bytes, number: int, payload: bytes) -> None:
        with self._writing:
            if self._closed:
                return
            try:
                self._program.write(_HEAD.pack(kind, number, len(payload)) + payload)
            except EnvironmentFailed as error:  # whoever reads from it hears it, too
                log.debug("forward.relay_lost", port=self.port, reason=str(error))

    def _forget(self, number: int) -> None:
        """Served to its end: the number may be used again once the relay has said so, too."""
        with self._lock:
            line = self._lines[number]
            line.ended = True
            self._free(number, line)
        self._say(b"X", number, b"")

    def _free(self, number: int, line: _Line) -> None:
        if line.ended and line.over:
            del self._lines[number]
