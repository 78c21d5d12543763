"""Redacts the attempt's token from stored files."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from app.agents.base import AgentJob

_SHORTEST = 8  # a shorter one is a placeholder, and replacing it would spoil ordinary text
_INSTEAD = b"[api key]"


def blot(job: AgentJob, places: Iterable[Path]) -> None:
    """Replace the job's key in all files of `places` (files, or folders with what is below), keeping their sizes.

    An endpoint that refuses a key may quote it, and frameworks write their configuration down.
    """
    key = job.model.api_key if job.model else None
    secret = key.get_secret_value().encode() if key else b""
    if len(secret) < _SHORTEST:
        return
    for place in places:
        for file in _files(place):
            _blot(file, secret, _INSTEAD.ljust(len(secret), b"*")[: len(secret)])


def _files(place: Path) -> Iterable[Path]:
    if not place.is_dir():
        yield place
        return
    for folder, _, names in os.walk(place):
        yield from (Path(folder, name) for name in names)


def _blot(file: Path, secret: bytes, instead: bytes) -> None:
    """What cannot be looked into is not kept."""
    try:
        _replace(file, secret, instead)
    except (OSError, ValueError):
        with suppress(OSError):
            file.unlink()


def _replace(file: Path, secret: bytes, instead: bytes) -> None:
    """In place, and of the same length: also a database stays one."""
    if file.is_symlink() or not file.is_file() or file.stat().st_size < len(secret):
        return
    file.chmod(0o600)
    with file.open("r+b") as handle, mmap.mmap(handle.fileno(), 0) as content:
        at = content.find(secret)
        while at >= 0:
            content[at : at + len(secret)] = instead
            at = content.find(secret, at + len(secret))
