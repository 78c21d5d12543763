"""Opens files of untrusted folders (tasks, datasets, build contexts); no link leads out of them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from app.errors import SpecInvalid

MAX_BYTES = 16 << 20
"""Of one file that is read whole: instructions, recipes, compose files."""


def inside(root: Path, path: Path) -> Path:
    """The path with all links followed, in the folder `root`; it need not exist. A link within the folder is fine.

    Raises: SpecInvalid: it leads out of the folder, or in a circle.
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
    """The content of a regular file in the folder `root`.

    Links are resolved first and the result is opened without following any, part by part, so that a link put there
    meanwhile fails.

    Raises: SpecInvalid: as `inside`, no regular file, or more than `most` bytes; OSError: it cannot be read.
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
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise SpecInvalid(f"{path}: expected a regular file; found a folder, a pipe or a device")
        content = file.read(most + 1)
    if len(content) > most:
        raise SpecInvalid(f"{path}: expected at most {most} bytes; found more")
    return content


def read_text_inside(root: Path, path: Path, *, errors: str = "strict") -> str:
    """The same as text. Raises: as `read_inside`; SpecInvalid: it is not UTF-8 and `errors` is strict."""
    try:
        return read_inside(root, path).decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise SpecInvalid(f"{path}: expected text in UTF-8; found {error}") from error
