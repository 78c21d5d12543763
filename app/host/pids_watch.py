"""How many processes the kernel refused for an environment's limit of them: by its control groups' own count.

A program that cannot start another hears "Resource temporarily unavailable", and need not pass it on.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_NAME = b"max "


class PidsWatch:
    """Reads what the kernel has counted. Safe for many threads."""

    def __init__(self, folders: Iterable[Path] = ()) -> None:
        """folders: its control groups; what starts no processes counts none, and what is not there is passed over."""
        self._files = tuple(folder / "pids.events" for folder in folders)

    def refused(self) -> int | None:
        """Since the groups were made; None where this host shows none of them (any more)."""
        counts = [count for file in self._files if (count := _count(file)) is not None]
        return sum(counts) if counts else None


def _count(file: Path) -> int | None:
    with suppress(OSError, ValueError):
        return next(
            (int(line[len(_NAME) :]) for line in file.read_bytes().splitlines() if line.startswith(_NAME)), None
        )
    return None
