"""Files that only their owner may read; a reader sees a whole one or none."""

from __future__ import annotations

import os
import secrets
import uuid
from contextlib import suppress
from pathlib import Path

_LEAST_SECRET = 16


def write_private(file: Path, text: str) -> None:
    """Write a file, in place of what is there. Raises: OSError."""
    _fresh(file, text).rename(file)


def own_secret(file: Path) -> str:
    """A secret that is made once and kept in `file`; one of a maker that was killed is made anew. Raises: OSError."""
    with suppress(FileNotFoundError):
        if len(kept := file.read_text()) >= _LEAST_SECRET:
            return kept
        file.unlink()  # empty: it would let everybody in
    fresh = _fresh(file, secrets.token_urlsafe(32))
    try:
        os.link(fresh, file)
    except FileExistsError:  # another process was first
        pass
    finally:
        fresh.unlink()
    return file.read_text()


def _fresh(file: Path, text: str) -> Path:
    fresh = file.with_name(f".{uuid.uuid4().hex}")
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as handle:
            handle.write(text)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    return fresh
