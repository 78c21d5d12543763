"""Defines the wire protocol of client and helper: frames with version, kind and length, little-endian.

`helper/helper.h` holds the same numbers. A text is its length, its bytes and a zero, so that the helper can use it in
place. A reply comes from inside the environment and is not trusted: all bounds are checked.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from functools import partial

from app.environments.contract import Stats
from app.models.shell import CommandResult, left_out

KEEP_BYTES = 1 << 20
"""Bytes kept of each stream of a command: this many of its start and this many of its end."""

VERSION = 2
MAGIC = 0x4853464D
HEADER = struct.Struct("<BBHI")
CHUNK_BYTES = 256 << 10
SCRIPT_BYTES = 100_000
"""Length from which a command becomes a script: the kernel refuses an argument of 128 KiB."""
_INLINE_BYTES = 32 << 10
_RUN = struct.Struct("<IIIIQ")
_SHELL_RUN = struct.Struct("<IQ")
_STREAM_OPEN = struct.Struct("<III")
_RESULT = struct.Struct("<6I6Q")  # exit code, signal, flags, 0, lengths kept, lengths in all, times and memory
_TIMED_OUT = 1
_LENGTH = struct.Struct("<I")


class FrameKind(IntEnum):
    """Kind of a frame: below 64 from the client (DATA and END from both), above from the helper."""

    RUN = 1
    DATA = 2
    END = 3
    SHELL_OPEN = 4
    SHELL_RUN = 5
    SHELL_CLOSE = 6
    STREAM_OPEN = 7
    RESIZE = 8
    SIGNAL = 9
    STOP = 10
    PUT = 11
    GET = 12
    PUT_TREE = 13
    GET_TREE = 14
    STATS = 15
    KILL_ALL = 16
    PING = 17
    LIST = 18
    HELLO = 64
    RESULT = 65
    OK = 66
    FAILED = 67
    OUT = 68
    ERR = 69
    EXIT = 70


class RunFlag(IntFlag):
    """Options for the start of a command."""

    STDIN_FOLLOWS = 1
    AS_SCRIPT = 4
    TERMINAL = 8


@dataclass(frozen=True, slots=True)
class FileListing:
    """Files below a folder: by path the kind (`f`ile, `d`ir, `l`ink, `o`ther) and the time of the last change.

    now_ns: start of the list, by the clock of those times (nanoseconds since 1970).
    """

    now_ns: int
    files: dict[str, tuple[str, int]]


def encoded(text: str) -> bytes:
    """Raises: ValueError: it holds a zero, which nothing that a program is started with may."""
    raw = text.encode("utf-8", "surrogateescape")
    if b"\0" in raw:
        raise ValueError("expected a text without zero bytes for a command, folder, variable or path.")
    return raw


def text(value: str | None) -> bytes:
    return field(encoded(value)) if value else b"\0\0\0\0\0"


def field(raw: bytes) -> bytes:
    return b"%b%b\0" % (_LENGTH.pack(len(raw)), raw)


def texts(values: Iterable[str]) -> bytes:
    fields = [text(value) for value in values]
    return _LENGTH.pack(len(fields)) + b"".join(fields)


def variables(env: Mapping[str, str]) -> tuple[int, bytes]:
    """Returns the number of variables, and their fields in order, which `run` joins with others."""
    return len(env), b"".join(text(f"{name}={value}") for name, value in env.items())


def frame(kind: FrameKind, payload: bytes = b"") -> bytes:
    return HEADER.pack(VERSION, kind, 0, len(payload)) + payload


def run(
    argv: list[str],
    script: bytes | None,
    *,
    cwd: str | None,
    user: str | None,
    env: tuple[int, bytes],
    timeout_ms: int,
    limit_bytes: int,
    stdin: bytes | None,
    log_bytes: int,
) -> bytes:
    """Builds the frame of a command; longer input follows it (`follows`).

    log_bytes: of each stream longer than its limit, this much comes while the command runs, as OUT and ERR.
    """
    flags = (RunFlag.AS_SCRIPT if script is not None else 0) | (RunFlag.STDIN_FOLLOWS if follows(stdin) else 0)
    head = _RUN.pack(flags, timeout_ms, limit_bytes, limit_bytes, log_bytes)
    payload = b"".join(
        (
            head,
            text(cwd),
            text(user),
            field(script or b""),
            b"\0\0\0\0\0" if stdin is None or follows(stdin) else field(stdin),
            texts(argv),
            _LENGTH.pack(env[0]),
            env[1],
        )
    )
    return frame(FrameKind.RUN, payload)


def follows(stdin: bytes | None) -> bool:
    return stdin is not None and len(stdin) > _INLINE_BYTES


def shell_open(program: str, *, cwd: str | None, user: str | None, env: tuple[int, bytes], limit_bytes: int) -> bytes:
    head = _LENGTH.pack(limit_bytes) * 2
    return frame(
        FrameKind.SHELL_OPEN, b"".join((head, text(program), text(cwd), text(user), _LENGTH.pack(env[0]), env[1]))
    )


def shell_run(command: bytes, *, timeout_ms: int, log_bytes: int) -> bytes:
    return frame(FrameKind.SHELL_RUN, _SHELL_RUN.pack(timeout_ms, log_bytes) + field(command))


def stream_open(
    argv: list[str], *, cwd: str | None, user: str | None, env: tuple[int, bytes], size: tuple[int, int] | None
) -> bytes:
    rows, columns = size or (0, 0)
    head = _STREAM_OPEN.pack(RunFlag.TERMINAL if size else 0, rows, columns)
    return frame(
        FrameKind.STREAM_OPEN, b"".join((head, text(cwd), text(user), texts(argv), _LENGTH.pack(env[0]), env[1]))
    )


def milliseconds(timeout_s: float) -> int:
    """Converts to milliseconds, at least one: zero would mean no limit."""
    return min(max(1, round(timeout_s * 1000)), 0xFFFF_FFFF)


def result_limit(limit_bytes: int) -> int:
    """Returns the maximum length of the reply to a command with this limit."""
    return _RESULT.size + 4 * limit_bytes + 4096


def result(
    payload: memoryview, limit_bytes: int, note: Callable[[FrameKind, int], str], *, duration_s: float
) -> CommandResult:
    """Decodes a result. note: finds the omitted bytes of OUT or ERR, by length. Raises: ValueError: inconsistent."""
    if len(payload) < _RESULT.size:
        raise ValueError("a result without its fields")
    code, _, flags, _, out, err, out_all, err_all, *_ = _RESULT.unpack_from(payload)
    start = _RESULT.size
    if out + err != len(payload) - start or out > out_all or err > err_all:
        raise ValueError("a result whose lengths do not agree")
    timed_out = bool(flags & _TIMED_OUT)
    return CommandResult(
        exit_code=None if timed_out else code,
        stdout=_joined(payload[start : start + out], out_all, limit_bytes, partial(note, FrameKind.OUT)),
        stderr=_joined(payload[start + out :], err_all, limit_bytes, partial(note, FrameKind.ERR)),
        timed_out=timed_out,
        truncated=out_all + err_all > out + err,
        duration_s=duration_s,
    )


def _joined(kept: memoryview, total: int, limit_bytes: int, note: Callable[[int], str]) -> bytes:
    if total == len(kept):
        return bytes(kept)
    gap = left_out(total - len(kept), note(total))
    return b"".join((kept[:limit_bytes], gap, kept[limit_bytes:]))


def failure(payload: memoryview) -> tuple[int, int, str]:
    """Decodes a FAILED frame: its kind (0 system, 1 archive, 2 request), the system's error number, the message."""
    if len(payload) < 8:
        raise ValueError("a failure without its fields")
    return payload[0], int.from_bytes(payload[4:8], "little"), bytes(payload[8:2048]).decode("utf-8", "replace")


def stats(payload: memoryview) -> Stats:
    """Raises: ValueError: it is no statistics."""
    lines = (line.partition(" ") for line in bytes(payload).decode("ascii", "replace").splitlines())
    values = {name: int(value) for name, _, value in lines}
    return Stats(
        processes=values.get("processes", 0),
        memory_bytes=values.get("memory_bytes"),
        memory_peak_bytes=values.get("memory_peak_bytes"),
        oom_kills=values.get("oom_kills"),
    )


def listing(records: bytes) -> FileListing:
    """Raises: ValueError."""
    first, *others = records.split(b"\0")[:-1]
    if first[:1] != b"n":
        raise ValueError("a list of files without its time")
    files = {}
    for one in others:
        changed, _, path = one[1:].partition(b" ")
        files[path.decode("utf-8", "surrogateescape")] = (chr(one[0]), int(changed))
    return FileListing(int(first[1:]), files)
