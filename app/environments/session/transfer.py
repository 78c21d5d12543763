"""Files and trees, in and out, in pieces."""

from __future__ import annotations

import errno
import io
import posixpath
from collections.abc import Callable, Iterator
from typing import BinaryIO

from app.environments.session import protocol
from app.environments.session.lane import Lane, LaneLost
from app.environments.session.lanes import Lanes
from app.environments.session.protocol import CHUNK_BYTES, Kind, field, frame
from app.errors import DiskFull, SpecInvalid

_PATIENCE_S = 900.0
"""For a whole transfer."""
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ELOOP, errno.ENXIO}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_OF_ARCHIVE = 1


def put(lanes: Lanes, path: str, content: bytes | BinaryIO, *, mode: int) -> None:
    _send(lanes, frame(Kind.PUT, mode.to_bytes(4, "little") + _path(path)), content, f"write {path}")


def put_tree(lanes: Lanes, path: str, archive: bytes | BinaryIO) -> None:
    _send(lanes, frame(Kind.PUT_TREE, _path(path)), archive, f"unpack into {path}")


def _send(lanes: Lanes, request: bytes, content: bytes | BinaryIO, doing: str) -> None:
    with lanes.lent(_PATIENCE_S) as lane:
        lane.send(request)
        for piece in _pieces(content):
            lane.send_data(piece)
        lane.send(frame(Kind.END))
        kind, payload = lane.receive(2048)
        problem = _problem(lanes, kind, payload, doing)
        if problem is None and kind is not Kind.OK:
            raise LaneLost(f"expected an answer to a file, found {kind.name}")
    if problem is not None:
        raise problem


def _pieces(content: bytes | BinaryIO) -> Iterator[memoryview]:
    if isinstance(content, bytes | bytearray | memoryview):
        whole = memoryview(content)
        for at in range(0, len(whole), CHUNK_BYTES):
            yield whole[at : at + CHUNK_BYTES]
        return
    while piece := content.read(CHUNK_BYTES):
        yield memoryview(piece)


def get(lanes: Lanes, what: Kind, path: str, *, limit_bytes: int) -> bytes:
    buffer = io.BytesIO()
    get_to(lanes, what, path, buffer.write, limit_bytes=limit_bytes)
    return buffer.getvalue()


def get_to(
    lanes: Lanes, what: Kind, path: str, write: Callable[[memoryview], object], *, limit_bytes: int | None
) -> int:
    """Hand every piece to `write`; how many bytes there were."""
    with lanes.lent(_PATIENCE_S) as lane:
        lane.send(frame(what, _path(path)))
        got, problem = _receive(lanes, lane, f"read {path}", write, limit_bytes)
    if problem is not None:
        raise problem
    return got


def _receive(
    lanes: Lanes, lane: Lane, doing: str, write: Callable[[memoryview], object], limit_bytes: int | None
) -> tuple[int, Exception | None]:
    got = 0
    while True:
        kind, payload = lane.receive(CHUNK_BYTES)
        if kind is Kind.DATA and payload:
            got += len(payload)
            if limit_bytes is not None and got > limit_bytes:
                raise lanes.failed(f"cannot {doing}: expected at most {limit_bytes} bytes, found more")
            write(payload)
        elif kind is Kind.END:
            return got, None
        else:
            problem = _problem(lanes, kind, payload, doing)
            if problem is None:
                raise LaneLost(f"expected a piece of a file, found {kind.name}")
            return got, problem


def _problem(lanes: Lanes, kind: Kind, payload: memoryview, doing: str) -> Exception | None:
    """The error that a FAILED stands for; None for another frame."""
    if kind is not Kind.FAILED:
        return None
    try:
        what, number, message = protocol.failure(payload)
    except ValueError as error:
        raise LaneLost(f"found {error}") from error
    if what == _OF_ARCHIVE:
        return SpecInvalid(message)
    if number in _FULL:
        return DiskFull(f"cannot {doing}: no space left in the environment ({message}).")
    if number in _ABSENT and doing.startswith("read"):
        return FileNotFoundError(f"cannot {doing}: {message}.")
    return lanes.failed(f"cannot {doing}: {message}")


def _path(path: str) -> bytes:
    """Raises: ValueError: it is relative, or the root itself."""
    clean = posixpath.normpath("/" + path.lstrip("/")) if path.startswith("/") else "/"
    if clean == "/" or "\0" in path:
        raise ValueError(f"expected an absolute path inside the environment, found {path!r}.")
    return field(protocol.encoded(clean))
