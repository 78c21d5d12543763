"""The compiled filter of system calls, kept in a file that nobody else can have written.

Whoever could write it would say what environments may ask of the kernel. So the folder and the file must be ours alone,
which is looked at through their open handles; anything else is taken for missing, and the filter is compiled again.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LIMIT_BYTES = 1 << 20


def read(file: Path) -> bytes | None:
    """Its content, or None when it is not there or not to be trusted."""
    with suppress(OSError), _ours(file.parent) as folder:
        handle = os.open(file.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        with open(handle, "rb") as found:
            about = os.fstat(handle)
            if stat.S_ISREG(about.st_mode) and _is_private(about) and about.st_nlink == 1:
                return found.read(_LIMIT_BYTES) or None
    return None


def write(file: Path, content: bytes) -> None:
    """Replace it, whole at once. Raises: OSError: the folder cannot be made ours alone."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(PermissionError):  # another's: then it is refused below
        file.parent.chmod(0o700)
    with _ours(file.parent) as folder:
        fresh = f"{file.name}.{os.getpid()}"
        with suppress(FileNotFoundError):
            os.unlink(fresh, dir_fd=folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(fresh, flags, 0o600, dir_fd=folder), "wb") as made:
            made.write(content)
        os.rename(fresh, file.name, src_dir_fd=folder, dst_dir_fd=folder)


@contextmanager
def _ours(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not _is_private(os.fstat(handle)):
            raise PermissionError(f"expected {folder} to be ours alone, found that others may write there")
        yield handle
    finally:
        os.close(handle)


def _is_private(about: os.stat_result) -> bool:
    return about.st_uid == os.geteuid() and not about.st_mode & 0o077
