"""Redacts secrets in stored files."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from app.agents.base import AgentJob

_SHORTEST = 8  # a shorter key is a placeholder, and replacing it would corrupt ordinary text
_INSTEAD = b"[redacted]"


def blot(job: AgentJob, places: Iterable[Path]) -> None:
    """Redacts the job's key in all files of `places` (files, or folders with their content).

    An endpoint that refuses a key may quote it, and frameworks write it into their configuration.
    """
    key = job.model.api_key if job.model else None
    secret = key.get_secret_value().encode() if key else b""
    if len(secret) < _SHORTEST:
        return
    for place in places:
        for file in _files(place):
            try:
                redact_file(file, secret)
            except (OSError, ValueError):  # a file that cannot be checked is removed
                with suppress(OSError):
                    file.unlink()


def _files(place: Path) -> Iterable[Path]:
    if not place.is_dir():
        yield place
        return
    for folder, _, names in os.walk(place):
        yield from (Path(folder, name) for name in names)


def redact_file(file: Path, secret: bytes) -> None:
    """Overwrites the secret in a file, which may be too large to read into memory.

    The size stays the same, so even a database stays valid. Raises: OSError, ValueError.
    """
    if not secret or file.is_symlink() or not file.is_file() or file.stat().st_size < len(secret):
        return
    file.chmod(0o600)
    instead = _INSTEAD.ljust(len(secret), b"*")[: len(secret)]
    with file.open("r+b") as handle, mmap.mmap(handle.fileno(), 0) as content:
        at = content.find(secret)
        while at >= 0:
            content[at : at + len(secret)] = instead
            at = content.find(secret, at + len(secret))
