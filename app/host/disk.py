"""A full disk, told apart from other faults: by the system's error, or by its words where an engine passes them on."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from app.errors import DiskFull

FULL = (errno.ENOSPC, errno.EDQUOT)
"""The system's errors for a full disk."""


def no_space(text: str) -> bool:
    """Whether a message speaks of a full disk."""
    return "no space left on device" in text.lower() or "disk quota exceeded" in text.lower()


@contextmanager
def disk_named(doing: str) -> Iterator[None]:
    """Turn the system's error for a full disk inside the block into ours; others pass.

    Raises: DiskFull.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise DiskFull(f"{doing}: {error}; free some space under MEGAFLOW_HOME.") from error
        raise
