"""Forwards a port through a small program inside (`relay.c`) over its stdin and stdout.

For environments whose network this worker cannot enter. Data from inside is not trusted: all bounds are checked.
"""

from __future__ import annotations

import platform
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue

import structlog

from app.environments import prebuilt
from app.environments.contract import Serve
from app.errors import EnvironmentFailed
from app.models.shell import InteractiveProgram

log = structlog.get_logger()

OpenStream = Callable[[Sequence[str]], InteractiveProgram]
"""Starts a program inside, with input and output: an environment's `stream`."""

MOST = 64  # as in relay.c
WINDOW_BYTES = 256 << 10
_PIECE_BYTES = 32 << 10
_FRAME_HEAD = struct.Struct("<cxHI")
_READY_S = 30.0
_UPLOAD_S = 60.0
_CHUNK_BYTES = 1 << 16
_RECEIVE = 'umask 077 && cat > "$0" && chmod 700 "$0" && echo received'

SendFrame = Callable[[bytes, int, bytes], None]


_ANSWER_BYTES = 1000
"""Maximum bytes of the answer of the shell inside, which may be the agent's own."""


def start_relay(stream: OpenStream, port: int, connections: int, machine: str | None = None) -> InteractiveProgram:
    """Starts the relay inside; the caller closes it. machine: None: this host's. Raises: EnvironmentFailed."""
    place = f"/tmp/.relay-{uuid.uuid4().hex}"
    upload = stream(["sh", "-c", _RECEIVE, place])
    try:
        program = prebuilt.content("relay", machine or platform.machine())
        for at in range(0, len(program), _CHUNK_BYTES):
            upload.write(program[at : at + _CHUNK_BYTES])
        upload.close_input()
        answer = b""
        while len(answer) < _ANSWER_BYTES and (part := upload.read(_UPLOAD_S)):
            answer += part[:_ANSWER_BYTES]
        if answer != b"received\n":
            raise EnvironmentFailed(f"expected to bring the relay of ports to {place} inside, found: {answer!r}.")
    finally:
        upload.close()
    return stream([place, str(port), str(connections)])


class RelayFault(Exception):
    """Received data is not a frame of a relay."""


class _FrameReader:
    def __init__(self, program: InteractiveProgram) -> None:
        self._program = program
        self._buffer = bytearray()

    def next(self, until: float | None = None) -> tuple[bytes, int, bytes]:
        """Reads a frame: kind, connection, payload. Raises: EOFError; RelayFault; EnvironmentFailed."""
        head = self._take(_FRAME_HEAD.size, until)
        kind, number, size = _FRAME_HEAD.unpack(head)
        if size > _PIECE_BYTES or number >= MOST:
            self._buffer[:0] = head
            raise RelayFault(self._unread_text())
        return kind, number, self._take(size, until)

    def _take(self, size: int, until: float | None) -> bytes:
        while len(self._buffer) < size:
            data = self._program.read(None if until is None else max(0.0, until - time.monotonic()))
            if not data:
                raise EOFError(self._unread_text())
            self._buffer += data
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    def _unread_text(self) -> str:
        return bytes(self._buffer[:200]).decode("utf-8", "replace") or "nothing"


class _RelayedConnection:
    def __init__(self, number: int, serve: Serve, send: SendFrame, forget: Callable[[int], None]) -> None:
        self._number = number
        self._serve = serve
        self._send = send
        self._forget = forget
        self._served, self._ours = socket.socketpair()
        self._coming: SimpleQueue[bytes | None] = SimpleQueue()
        self._owed = 0  # bytes received and not yet passed on
        self._credit = WINDOW_BYTES
        self._changed = threading.Condition()
        self._broken = False
        self.ended = self.over = False  # here, and inside: its number is free when both are set
        self._threads = [
            threading.Thread(target=work, name="forward-carry", daemon=True) for work in (self._inwards, self._outwards)
        ]
        for thread in self._threads:
            thread.start()
        threading.Thread(target=self._attend, name="forward-serve", daemon=True).start()

    def receive(self, data: bytes) -> None:
        """Raises: RelayFault: more than it may send."""
        with self._changed:
            self._owed += len(data)
            if self._owed > WINDOW_BYTES:
                raise RelayFault("more bytes than it had credit for")
        self._coming.put(data)

    def end_input(self) -> None:
        self._coming.put(None)

    def add_credit(self, size: int) -> None:
        with self._changed:
            self._credit += size
            self._changed.notify_all()

    def break_off(self) -> None:
        """Shuts the served socket: the connection inside has ended."""
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
            self._served.close()  # what was written last is still read from our end
            self._threads[1].join()
            self._coming.put(None)
            self._threads[0].join()
            self._ours.close()
            self._forget(self._number)

    def _inwards(self) -> None:
        with suppress(OSError):  # the handler has closed it
            while (data := self._coming.get()) is not None:
                self._ours.sendall(data)
                with self._changed:
                    self._owed -= len(data)
                self._send(b"C", self._number, struct.pack("<I", len(data)))
            self._ours.shutdown(socket.SHUT_WR)

    def _outwards(self) -> None:
        while (most := self._allowed()) > 0:
            try:
                data = self._ours.recv(most)
            except OSError:
                return
            if not data:
                self._send(b"E", self._number, b"")
                return
            with self._changed:
                self._credit -= len(data)
            self._send(b"D", self._number, data)

    def _allowed(self) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._credit > 0 or self._broken)
            return 0 if self._broken else min(self._credit, _PIECE_BYTES)


class RelayedForward:
    """A `Forward` over a running relay, which it ends."""

    def __init__(self, program: InteractiveProgram, serve: Serve) -> None:
        self._program = program
        self._frames = _FrameReader(program)
        self._serve = serve
        self._connections: dict[int, _RelayedConnection] = {}
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._closed = False
        self.port = self._ready()
        threading.Thread(target=self._listen, name="forward-relay", daemon=True).start()

    def _ready(self) -> int:
        try:
            kind, _, payload = self._frames.next(time.monotonic() + _READY_S)
            if kind != b"R" or len(payload) != 2:
                raise RelayFault(f"{kind!r} before it was ready")
        except (EOFError, RelayFault) as error:
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
        """Stops accepting connections and ends the existing ones. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections = list(self._connections.values())
        self._program.close()
        for connection in connections:
            connection.break_off()

    def _listen(self) -> None:
        try:
            while True:
                self._handle(*self._frames.next())
        except (EOFError, EnvironmentFailed) as error:
            log.debug("forward.relay_ended", port=self.port, reason=str(error))
        except RelayFault as error:
            log.warning("forward.relay_refused", port=self.port, reason=str(error))
        finally:
            self.close()

    def _handle(self, kind: bytes, number: int, payload: bytes) -> None:
        with self._lock:
            connection = self._connections.get(number)
            if kind == b"O" and connection is None:
                if not self._closed:
                    self._connections[number] = _RelayedConnection(number, self._serve, self._send, self._forget)
                return
            if kind == b"X" and connection is not None:
                connection.over = True
                self._free(number, connection)
        match kind:
            case _ if connection is None:
                raise RelayFault(f"{kind!r} of a connection that there is not")
            case b"D":
                connection.receive(payload)
            case b"E":
                connection.end_input()
            case b"C" if len(payload) == 4:
                connection.add_credit(int.from_bytes(payload, "little"))
            case b"X":
                connection.break_off()
            case _:
                raise RelayFault(f"{kind!r} is no frame that it sends")

    def _send(self, kind: bytes, number: int, payload: bytes) -> None:
        with self._writing:
            if self._closed:
                return
            try:
                self._program.write(_FRAME_HEAD.pack(kind, number, len(payload)) + payload)
            except EnvironmentFailed as error:  # reading from it ends too
                log.debug("forward.relay_lost", port=self.port, reason=str(error))

    def _forget(self, number: int) -> None:
        """Marks a connection as ended here and notifies the relay; its number is free when both have ended it."""
        with self._lock:
            connection = self._connections[number]
            connection.ended = True
            self._free(number, connection)
        self._send(b"X", number, b"")

    def _free(self, number: int, connection: _RelayedConnection) -> None:
        if connection.ended and connection.over:
            del self._connections[number]
