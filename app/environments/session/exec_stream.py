"""An exec's stream, taken over from the engine: of its frames, stdout is handed on."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

from docker.errors import DockerException
from requests import RequestException

from app.host.engine import Engine

_HEADER = struct.Struct(">BxxxI")
_STDERR = 2
_SAID_BYTES = 2000


class ExecStream:
    """A running exec as a stream of bytes, as a session's lane needs it.

    Nothing is read ahead, so that whoever polls `fileno` hears of everything that is there.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left = 0  # of the frame under way
        self.said = b""  # on stderr

    def sendall(self, data: bytes | memoryview, /) -> None:
        self._connection.sendall(data)

    def recv_into(self, buffer: memoryview, /) -> int:
        """As a socket's: 0 at the end. Raises: TimeoutError, OSError."""
        while not self._left:
            header = self._exactly(_HEADER.size)
            if not header:
                return 0
            stream, size = _HEADER.unpack(header)
            if stream == _STDERR:
                self.said = (self.said + self._exactly(size))[:_SAID_BYTES]
            else:
                self._left = size
        got = self._connection.recv_into(buffer[: self._left])
        self._left -= got
        return got

    def _exactly(self, size: int) -> bytes:
        """So many bytes, or nothing when the stream ended."""
        found = bytearray()
        while len(found) < size:
            piece = self._connection.recv(size - len(found))
            if not piece:
                return b""
            found += piece
        return bytes(found)

    def settimeout(self, value: float | None, /) -> None:
        self._connection.settimeout(value)

    def shutdown(self, how: int, /) -> None:
        self._connection.shutdown(how)

    def close(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def fileno(self) -> int:
        return self._connection.fileno()


def exec_stream(engine: Engine, container_id: str, argv: list[str], *, user: str = "0") -> ExecStream:
    """Start `argv` inside, with input, and take its stream. user: empty for the container's own.

    Raises: OSError: it cannot be started, or there is no container.
    """
    try:
        exec_id = engine.api.exec_create(container_id, argv, stdin=True, user=user, workdir="/")["Id"]
        return ExecStream(engine.attach(exec_id))
    except (DockerException, RequestException) as error:
        raise ConnectionError(str(error)) from error
