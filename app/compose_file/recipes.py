"""Build contexts of single services, cut out of the bundle: the same files give the same bytes, so images are shared.

A build's arguments and its last stage are written into its Dockerfile: whoever builds needs to know of neither.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from pathlib import Path

from app.compose_file.model import Recipe
from app.errors import SpecInvalid
from app.task_files import read_text_inside

_ARG = re.compile(r"^(\s*ARG\s+)([A-Za-z_][A-Za-z0-9_]*)(\s*=.*)?$", re.IGNORECASE)
_FROM = re.compile(r"^\s*FROM\s+(?:--\S+\s+)*\S+(?:\s+AS\s+(\S+))?\s*$", re.IGNORECASE)


def adapted(text: str, recipe: Recipe) -> str:
    """The Dockerfile with the recipe's arguments as defaults, and without the stages behind its target.

    Raises: SpecInvalid: no such stage.
    """
    given = dict(recipe.args)
    lines = []
    for line in text.splitlines():
        found = _ARG.match(line)
        known = found is not None and found[2] in given
        lines.append(f"{found[1]}{found[2]}={_quoted(given[found[2]])}" if found and known else line)
    return "\n".join(lines if recipe.target is None else _until(lines, recipe.target)) + "\n"


def _until(lines: list[str], target: str) -> list[str]:
    starts = [(number, found) for number, line in enumerate(lines) if (found := _FROM.match(line))]
    names = [(found[1] or str(place)).lower() for place, (_, found) in enumerate(starts)]
    if target.lower() not in names and not (target.isdigit() and int(target) < len(starts)):
        raise SpecInvalid(f"expected a stage {target!r} in the Dockerfile; found {', '.join(names) or 'none'}")
    place = names.index(target.lower()) if target.lower() in names else int(target)
    return lines[: starts[place + 1][0]] if place + 1 < len(starts) else lines


def _quoted(value: str) -> str:
    return '"' + re.sub(r'(["\\$])', r"\\\1", value) + '"'


def context_of(folder: Path, recipe: Recipe) -> bytes:
    """The recipe's folder in the unpacked bundle as a normalised tar, its Dockerfile adapted.

    Raises: SpecInvalid: no such stage.
    """
    root = folder / recipe.context
    dockerfile = (root / recipe.dockerfile).resolve()
    changed = adapted(read_text_inside(folder, dockerfile, errors="replace"), recipe).encode()
    return packed(root, {dockerfile: changed} if recipe.args or recipe.target else {})


def packed(root: Path, changed: dict[Path, bytes] | None = None, below: str = "") -> bytes:
    """A folder or one file as a tar of names below `below`: sorted, owned by root, without times."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        paths = [root] if root.is_file() else sorted(Path(at) / name for at, a, b in os.walk(root) for name in a + b)
        if root.is_dir() and below:
            tar.addfile(_member(tar, root, below))
        for path in paths:
            name = below if path == root else str(Path(below) / path.relative_to(root))
            member = _member(tar, path, name)
            content = (changed or {}).get(path.resolve(), b"") if member.isreg() else b""
            if member.isreg():
                content = content or path.read_bytes()
                member.size = len(content)
            tar.addfile(member, io.BytesIO(content) if member.isreg() else None)
    return buffer.getvalue()


def packed_nothing() -> bytes:
    """A tar of an empty folder's content."""
    buffer = io.BytesIO()
    tarfile.open(fileobj=buffer, mode="w").close()
    return buffer.getvalue()


def _member(tar: tarfile.TarFile, path: Path, name: str) -> tarfile.TarInfo:
    member = tar.gettarinfo(path, name.lstrip("/"))
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = 0
    if not member.issym():
        member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    if member.islnk():  # hard links would depend on where the tar begins
        member.type, member.linkname = tarfile.REGTYPE, ""
    return member
