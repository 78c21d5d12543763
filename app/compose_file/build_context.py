"""Packs the build context of one service from the bundle. The same files give the same bytes.

Build arguments and the target stage are written into the Dockerfile, so builders need not support either.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path

from app.errors import SpecInvalid

_ARG = re.compile(r"^\s*ARG\s+(.*)$", re.IGNORECASE)
_DECLARED = re.compile(r"""([A-Za-z_]\w*)((?:\s*=(?:"(?:\\.|[^"])*"|'[^']*'|\\.|\S)*)?)""")
_FROM = re.compile(r"^\s*FROM\s+(?:--\S+\s+)*\S+(?:\s+AS\s+(\S+))?\s*$", re.IGNORECASE)


def adapted(text: str, args: Mapping[str, str], target: str | None = None) -> str:
    """Returns the Dockerfile with these defaults and no stage after its target. Raises: SpecInvalid: no such target."""
    lines = []
    for line in text.removesuffix("\n").split("\n"):
        lines += _argument(line, args)
    return "\n".join(lines if target is None else _until(lines, target)) + "\n"


def _argument(line: str, args: Mapping[str, str]) -> list[str]:
    """Returns the line, or one line per argument if it declares a given argument. Raises: SpecInvalid."""
    match = _ARG.match(line)
    declared = _DECLARED.findall(match[1]) if match else []
    if not any(name in args for name, _ in declared):
        return [line]
    if line.rstrip().endswith("\\"):
        raise SpecInvalid(f"expected an ARG that a build argument replaces on one line; found {line.strip()[:80]!r}")
    return [f"ARG {name}={_quoted(args[name])}" if name in args else f"ARG {name}{value}" for name, value in declared]


def _until(lines: list[str], target: str) -> list[str]:
    starts = [(number, match) for number, line in enumerate(lines) if (match := _FROM.match(line))]
    names = [(match[1] or str(place)).lower() for place, (_, match) in enumerate(starts)]
    if target.lower() not in names and not (target.isdigit() and int(target) < len(starts)):
        raise SpecInvalid(f"expected a stage {target!r} in the Dockerfile; found {', '.join(names) or 'none'}")
    place = names.index(target.lower()) if target.lower() in names else int(target)
    return lines[: starts[place + 1][0]] if place + 1 < len(starts) else lines


def _quoted(value: str) -> str:
    return '"' + re.sub(r'(["\\$])', r"\\\1", value) + '"'


def packed(root: Path, changed: Mapping[Path, bytes] | None = None, below: str = "") -> bytes:
    """Packs a folder or one file as a tar with names below `below`: sorted, owned by root, without times."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        paths = [root] if root.is_file() else sorted(Path(at) / name for at, a, b in os.walk(root) for name in a + b)
        for path in [root, *paths] if root.is_dir() and below else paths:
            name = below if path == root else str(Path(below) / path.relative_to(root))
            member = _member(tar, path, name)
            content = None
            if member.isreg():
                content = (changed or {}).get(path.resolve()) or path.read_bytes()
                member.size = len(content)
            tar.addfile(member, None if content is None else io.BytesIO(content))
    return buffer.getvalue()


def _member(tar: tarfile.TarFile, path: Path, name: str) -> tarfile.TarInfo:
    member = tar.gettarinfo(path, name.lstrip("/"))
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = 0
    if not member.issym():
        member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    if member.islnk():  # a hard link would depend on which files the tar already has
        member.type, member.linkname = tarfile.REGTYPE, ""
    return member
