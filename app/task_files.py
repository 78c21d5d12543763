"""Opens files of untrusted folders (tasks, datasets, build contexts). No link can lead out of the folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from app.errors import SpecInvalid

MAX_BYTES = 16 << 20
"""Size limit in bytes of a file that is read whole: instructions, recipes, compose files."""


def inside(root: Path, path: Path) -> Path:
    """Resolves all links of a path and checks that it stays in the folder `root`. The path need not exist.

    Links within the folder are fine. Raises: SpecInvalid: the path leads out of the folder, or in a circle.
    """
    try:
        real = path.resolve()
        within = real.is_relative_to(root.resolve())
    except (OSError, RuntimeError) as error:
        raise SpecInvalid(f"{path}: expected a path inside {root}; found {error}") from error
    if not within:
        raise SpecInvalid(f"{path}: expected it inside {root}; found a link that leads out of it")
    return real


def read_inside(root: Path, path: Path, *, most: int = MAX_BYTES) -> bytes:
    """Reads a regular file in the folder `root`.

    Links are resolved first. The result is then opened part by part without following links, so a link created
    in between makes the open fail.

    Raises: SpecInvalid: as `inside`, not a regular file, or more than `most` bytes; OSError: it cannot be read.
    """
    real = inside(root, path)
    parts = real.relative_to(root.resolve()).parts
    folder = os.open(root.resolve(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            os.close(folder)
            folder = below
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(parts[-1] if parts else ".", flags, dir_fd=folder)
    finally:
        os.close(folder)
    with open(handle, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise SpecInvalid(f"{path}: expected a regular file; found a folder, a pipe or a device")
        content = file.read(most + 1)
    if len(content) > most:
        raise SpecInvalid(f"{path}: expected at most {most} bytes; found more")
    return content


def read_text_inside(root: Path, path: Path, *, errors: str = "strict") -> str:
    """Reads the file as text. Raises: as `read_inside`; SpecInvalid: it is not UTF-8 and `errors` is strict."""
    try:
        return read_inside(root, path).decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise SpecInvalid(f"{path}: expected text in UTF-8; found {error}") from error
