"""Files in memory that nobody can change any more: read once, looked at, and the same for as long as we run."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Hashable

from app.environments.isolation.spawning import FREE_FROM

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_copies: dict[Hashable, int] = {}


def sealed(key: Hashable, content: Callable[[], bytes]) -> int:
    """The file (a descriptor, not to be closed) with the content that `key` stands for; made once in each process."""
    mine = (os.getpid(), key)
    if mine not in _copies:
        copy = os.memfd_create("sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with open(copy, "wb", closefd=False) as file:
                file.write(content())
            fcntl.fcntl(copy, fcntl.F_ADD_SEALS, _SEALS)
            _copies[mine] = fcntl.fcntl(copy, fcntl.F_DUPFD_CLOEXEC, FREE_FROM)  # if two threads make one, both work
        finally:
            os.close(copy)
    return _copies[mine]


def program_at(descriptor: int) -> str:
    """By which path such a file is executed."""
    return f"/proc/self/fd/{descriptor}"
