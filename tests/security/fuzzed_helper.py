"""The session helper under AddressSanitizer and UBSan, and a generator of broken requests and archives for it."""

from __future__ import annotations

import io
import random
import shutil
import socket
import struct
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from app.environments.prebuilt import SOURCES
from app.environments.session import protocol
from app.environments.session.protocol import FrameKind, field, frame
from tests.services import missing

_HELPER = SOURCES["helper"]
_SANITIZED = ("-std=c11", "-g", "-O1", "-fsanitize=address,undefined", "-fno-omit-frame-pointer", f"-I{_HELPER}")
_REFUSED = 77
_FOUND = ("AddressSanitizer", "runtime error")
_CASE_S = 20.0
"""The longest that one case may take."""
_BLOCK = 512
_EDGES = (0, 1, 2, 4, 5, 7, 8, 99, 100, 155, 255, 256, 511, 512, 513, 4095, 4096, 4097, 0xFFFF, 1 << 16, (1 << 16) + 1)
_HUGE = (1 << 25, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
NO_VARIABLES = (0, b"")


def built(folder: Path) -> Path:
    """The sanitized helper; skips the test, or fails it in CI, where it cannot be built or confined."""
    sources = [Path(__file__).with_name("confined_helper.c")]
    sources += [one for one in sorted(_HELPER.glob("*.c")) if one.name != "main.c"]
    program = folder / "confined-helper"
    if shutil.which("gcc") is None:
        missing("a compiler with sanitizers")
    subprocess.run(["gcc", *_SANITIZED, "-o", program, *sources], check=True)
    if subprocess.run([program, str(folder), "--help"], capture_output=True, check=False).returncode == _REFUSED:
        missing("a host that lets a program change its root")
    return program


class Target:
    """A running sanitized helper. `send` makes one connection; a report of a sanitizer fails the test."""

    def __init__(self, address: Path, report: Path, root: Path) -> None:
        self._address = address
        self._report = report
        self._root = root

    def send(self, case: bytes) -> None:
        """Send all, then wait until the helper closes the connection."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_CASE_S)
            connection.connect(str(self._address))
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(case)
                connection.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                while connection.recv(1 << 16):
                    pass
        said = self._report.read_text(errors="replace")
        assert not any(word in said for word in _FOUND), f"{said[:4000]}\nThe case: {case[:4000]!r}"

    def tidy(self) -> None:
        """Remove the files that the cases left."""
        names = [str(one) for one in self._root.iterdir()]
        subprocess.run(["rm", "-rf", "--", *names], check=True)  # deeper than Python would go


@contextmanager
def running(program: Path, folder: Path) -> Iterator[Target]:
    root, report, address = folder / "root", folder / "report", folder / "s"
    root.mkdir()
    options = {"ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening, report.open("wb") as said:
        listening.bind(str(address))
        listening.listen(16)
        number = listening.fileno()
        command = [str(program), str(root), "--listen-fd", str(number)]
        helper = subprocess.Popen(command, stderr=said, pass_fds=[number], env=options)
    target = Target(address, report, root)
    try:
        yield target
        assert helper.poll() is None, f"the helper has ended: {report.read_text(errors='replace')[:4000]}"
    finally:
        helper.terminate()
        helper.wait(20)
        target.tidy()


def fuzz(target: Target, make: Callable[[random.Random], bytes], *, seed: int, seconds: float, least: int) -> int:
    """Send cases for `seconds`, but at least `least`; how many it were."""
    chance, count, until = random.Random(seed), 0, time.monotonic() + seconds
    while count < least or time.monotonic() < until:
        target.send(make(chance))
        count += 1
        if count % 500 == 0:
            target.tidy()
    return count


def put_tree(chance: random.Random) -> bytes:
    """Requests to unpack broken archives."""
    cases = []
    for _ in range(chance.randrange(1, 6)):
        archive = _archive(chance)
        pieces = [archive]
        if chance.random() < 0.3:
            at = chance.randrange(len(archive) + 1)
            pieces = [archive[:at], archive[at:]]
        parts = b"".join(frame(FrameKind.DATA, one) for one in pieces if one)
        cases.append(frame(FrameKind.PUT_TREE, field(b"/in")) + parts + frame(FrameKind.END))
    return b"".join(cases)


def _archive(chance: random.Random) -> bytes:
    blocks = bytearray()
    for _ in range(chance.randrange(1, 4)):
        if chance.random() < 0.5:
            blocks += _described(chance)
        blocks += _member(chance)
    if chance.random() < 0.5:
        blocks += bytes(2 * _BLOCK)
    if chance.random() < 0.4:
        _damage(blocks, chance)
    return bytes(blocks)


def _member(chance: random.Random) -> bytes:
    buffer = io.BytesIO()
    formats = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
    with tarfile.open(fileobj=buffer, mode="w", format=chance.choice(formats)) as tar:
        member = tarfile.TarInfo(_name(chance, most=90))
        member.type = chance.choice((*tarfile.SUPPORTED_TYPES[:7], b"7", b"Z"))
        member.linkname = _name(chance, most=90) if chance.random() < 0.5 else ""
        member.mtime = chance.choice((0, 1, 1 << 32, -1)) if tar.format == tarfile.PAX_FORMAT else 0
        content = chance.randbytes(chance.choice((0, 1, 511, 512, 513)))
        member.size = len(content) if member.type in (tarfile.REGTYPE, b"7") else 0
        tar.addfile(member, io.BytesIO(content))
        raw = bytearray(buffer.getvalue())
    if chance.random() < 0.3:
        raw[124:136] = chance.choice((b"\x80" + chance.randbytes(11), b"77777777777\0", b"\xff" * 12, bytes(12)))
        _sum(raw)
    return bytes(raw)


def _described(chance: random.Random) -> bytes:
    """A header that describes the next one, with a content that no good program writes."""
    kind = chance.choice(b"xxxxgLK")
    content = _records(chance) if kind in b"xg" else _name(chance, most=9000).encode()
    claimed = len(content) if chance.random() < 0.8 else chance.choice((*_EDGES, *_HUGE))
    head = bytearray(_BLOCK)
    head[0:3], head[124:136], head[156] = b"pax", b"%011o\0" % (claimed % (1 << 33)), kind
    head[257:265] = b"ustar\x0000"
    _sum(head)
    return bytes(head) + content + bytes(-len(content) % _BLOCK)


def _records(chance: random.Random) -> bytes:
    made = b""
    for _ in range(chance.randrange(1, 5)):
        key = chance.choice((b"path", b"linkpath", b"mtime", b"size", b"GNU.sparse.map", b"", b"k"))
        value = chance.choice((b"", b"-1", b"9" * 30, b"x", _name(chance, most=5000).encode()))
        rest = b" " + key + chance.choice((b"=", b"=", b"=", b"")) + value + chance.choice((b"\n", b"\n", b""))
        true = next(n for n in range(len(rest), len(rest) + 9) if n == len(rest) + len(str(n)))
        length = true if chance.random() < 0.6 else chance.choice((*_EDGES, true - 1, true + 1, -5))
        zeros = chance.choice(("", "", "0" * chance.randrange(40), " " * chance.randrange(40)))
        made += f"{zeros}{length}".encode() + rest
    return made


def _name(chance: random.Random, *, most: int) -> str:
    parts = ("a", "bb", "..", ".", "", "x" * 99, "link", "in", "é")
    length = chance.choice([n for n in _EDGES if n <= most])
    name = "/".join(chance.choice(parts) for _ in range(chance.randrange(1, 6)))
    return (name * (length // max(1, len(name)) + 1))[: max(1, length)]


def _sum(head: bytearray) -> None:
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head[:_BLOCK])


def frames(chance: random.Random) -> bytes:
    """A few requests of all kinds with broken fields, lengths and headers."""
    made = bytearray(b"".join(_request(chance) for _ in range(chance.randrange(1, 6))))
    if chance.random() < 0.5:
        _damage(made, chance)
    return bytes(made)


def _request(chance: random.Random) -> bytes:
    limit = chance.choice((0, 1, 1000, 1 << 20))
    valid = (
        lambda: protocol.run(
            ["none", "x"], chance.choice((None, b"script")), cwd="/", user=chance.choice((None, "a:b")),
            env=NO_VARIABLES, timeout_ms=50, limit_bytes=limit, stdin=chance.choice((None, b"in")), log_bytes=limit,
        ),
        lambda: protocol.shell_open("none", cwd="/", user=None, env=(1, protocol.text("A=b")), limit_bytes=limit),
        lambda: protocol.shell_run(b"true", timeout_ms=50, log_bytes=limit),
        lambda: protocol.stream_open(["none"], cwd="/", user=None, env=NO_VARIABLES, size=(2, 3)),
        lambda: protocol.stream_open(["none"], cwd="/", user=None, env=NO_VARIABLES, size=None),
        lambda: frame(FrameKind.PUT, struct.pack("<I", 0o644) + field(b"/in/file")) + frame(FrameKind.DATA, b"x" * 9),
        lambda: frame(FrameKind.GET, field(b"/in/file")),
        lambda: frame(FrameKind.GET_TREE, field(b"/in")),
        lambda: frame(FrameKind.PUT_TREE, field(b"/in")),
        lambda: frame(chance.choice(list(FrameKind)), chance.randbytes(chance.choice(_EDGES[:10]))),
        lambda: frame(FrameKind.END),
    )  # fmt: skip
    made = bytearray(chance.choice(valid)())
    for _ in range(chance.choice((0, 0, 1, 2, 3))):
        _mutate_field(made, chance)
    return bytes(made)


def _mutate_field(made: bytearray, chance: random.Random) -> None:
    """A number of four bytes somewhere in the payload, or the payload cut or grown with its length put right."""
    at = chance.randrange(protocol.HEADER.size, len(made) + 1)
    how = chance.random()
    if how < 0.4 and at + 4 <= len(made):
        made[at : at + 4] = struct.pack("<I", chance.choice((*_EDGES, *_HUGE, len(made) - at - 4)))
    elif how < 0.7:
        del made[at : at + chance.randrange(1, 20)]
    else:
        made[at:at] = chance.randbytes(chance.randrange(1, 20))
    if chance.random() < 0.9:
        made[4:8] = struct.pack("<I", len(made) - protocol.HEADER.size)


def _damage(made: bytearray, chance: random.Random) -> None:
    """Anything, anywhere."""
    for _ in range(chance.randrange(1, 4)):
        at, size = chance.randrange(len(made) + 1), chance.randrange(1, 9)
        how = chance.random()
        if how < 0.4:
            made[at : at + size] = chance.randbytes(size)
        elif how < 0.6:
            del made[at : at + size]
        elif how < 0.8:
            made[at:at] = chance.randbytes(size)
        elif how < 0.9:
            del made[at:]
        else:
            made += made[at : at + _BLOCK]
