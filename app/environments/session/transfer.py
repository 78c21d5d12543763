"""Moves files and trees in and out, in pieces."""

from __future__ import annotations

import errno
import io
from typing import BinaryIO

from app.environments.session import protocol
from app.environments.session.connection import ConnectionLost, HelperConnection
from app.environments.session.connection_pool import ConnectionPool
from app.environments.session.protocol import CHUNK_BYTES, FileListing, FrameKind, field, frame
from app.errors import DiskFull, SpecInvalid
from app.host import archives
from app.host.disk import FULL

_TRANSFER_S = 900.0
"""Time limit of a whole transfer."""
_MISSING_ERRNOS = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ELOOP, errno.ENXIO}
_ARCHIVE_FAULT = 1


def put(pool: ConnectionPool, path: str, content: bytes, *, mode: int) -> None:
    _send(pool, frame(FrameKind.PUT, mode.to_bytes(4, "little") + _path(path)), content, f"write {path}")


def put_tree(pool: ConnectionPool, path: str, archive: bytes | BinaryIO) -> None:
    _send(pool, frame(FrameKind.PUT_TREE, _path(path)), archive, f"unpack into {path}")


def _send(pool: ConnectionPool, request: bytes, content: bytes | BinaryIO, doing: str) -> None:
    with pool.exchange(_TRANSFER_S) as connection:
        connection.send(request)
        send_pieces(connection, content)
        kind, payload = connection.receive(2048)
        problem = _problem(pool, kind, payload, doing)
        if problem is None and kind is not FrameKind.OK:
            raise ConnectionLost(f"expected an answer to a file, found {kind.name}")
    if problem is not None:
        raise problem


def send_pieces(connection: HelperConnection, content: bytes | BinaryIO) -> None:
    """Sends content as DATA frames, and the END. Raises: ConnectionLost."""
    file = io.BytesIO(content) if isinstance(content, bytes | bytearray) else content
    while piece := file.read(CHUNK_BYTES):
        connection.send_data(memoryview(piece))
    connection.send(frame(FrameKind.END))


def get(pool: ConnectionPool, what: FrameKind, path: str, *, limit_bytes: int) -> bytes:
    buffer = io.BytesIO()
    with pool.exchange(_TRANSFER_S) as connection:
        connection.send(frame(what, _path(path)))
        problem = _receive(pool, connection, f"read {path}", buffer, limit_bytes)
    if problem is not None:
        raise problem
    return buffer.getvalue()


def list_files(pool: ConnectionPool, path: str, *, limit_bytes: int) -> FileListing:
    """Lists the files below a folder, which may be the root."""
    records = io.BytesIO()
    with pool.exchange(_TRANSFER_S) as connection:
        connection.send(frame(FrameKind.LIST, field(path.encode("utf-8", "surrogateescape"))))
        problem = _receive(pool, connection, f"read {path}", records, limit_bytes)
        if problem is not None:
            raise problem
        try:
            return protocol.listing(records.getvalue())
        except ValueError as error:
            raise ConnectionLost(f"found {error}") from error


def _receive(
    pool: ConnectionPool, connection: HelperConnection, doing: str, into: io.BytesIO, limit_bytes: int
) -> Exception | None:
    while True:
        kind, payload = connection.receive(CHUNK_BYTES)
        if kind is FrameKind.DATA and payload:
            into.write(payload)
            if into.tell() > limit_bytes:
                raise pool.failed(f"cannot {doing}: expected at most {limit_bytes} bytes, found more")
        elif kind is FrameKind.END:
            return None
        else:
            problem = _problem(pool, kind, payload, doing)
            if problem is None:
                raise ConnectionLost(f"expected a piece of a file, found {kind.name}")
            return problem


def _problem(pool: ConnectionPool, kind: FrameKind, payload: memoryview, doing: str) -> Exception | None:
    if kind is not FrameKind.FAILED:
        return None
    try:
        what, number, message = protocol.failure(payload)
    except ValueError as error:
        raise ConnectionLost(f"found {error}") from error
    if what == _ARCHIVE_FAULT:
        return SpecInvalid(message)
    if number in FULL:
        return DiskFull(f"cannot {doing}: no space left in the environment ({message}).")
    if number in _MISSING_ERRNOS and doing.startswith("read"):
        return FileNotFoundError(f"cannot {doing}: {message}.")
    return pool.failed(f"cannot {doing}: {message}")


def _path(path: str) -> bytes:
    return field(archives.absolute(path).encode("utf-8", "surrogateescape"))
