"""Defines the interface of the artifact store: bytes under keys."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from app.errors import SpecInvalid

_LONGEST_BYTES = 1000  # S3 allows 1024, including the prefix
_LONGEST_SEGMENT = 255  # limit of file names


class ArtifactStore(Protocol):
    """Bytes under relative paths; a second write replaces. Raises (every method): SpecInvalid: see `checked`."""

    def put(self, key: str, content: bytes) -> str:
        """Stores `content` durably; returns its URL (`file://`, …). Raises: ArtifactStoreUnavailable, DiskFull."""
        ...

    def put_file(self, key: str, file: Path) -> str:
        """Stores a file without loading all of it into memory. Raises: ArtifactStoreUnavailable, DiskFull."""
        ...

    def create(self, key: str, content: bytes) -> bool:
        """Stores `content` if the key is new; False: the key exists. Raises: ArtifactStoreUnavailable, DiskFull."""
        ...

    def get(self, key: str) -> bytes:
        """Raises: ArtifactMissing, ArtifactStoreUnavailable."""
        ...

    def exists(self, key: str) -> bool:
        """Raises: ArtifactStoreUnavailable."""
        ...

    def url(self, key: str) -> str:
        """Returns the URL of `key`, which need not exist."""
        ...

    def link(self, key: str, expires_s: float) -> str | None:
        """Returns a download URL valid for `expires_s`; existence is not checked. None: this store makes no links."""
        ...

    def check(self) -> None:
        """Writes, reads and deletes a probe object. Raises: ArtifactStoreUnavailable with the reason and the fix."""
        ...


def checked(key: str) -> str:
    """Returns `key` if it stays below the store's root and names one object. Raises: SpecInvalid."""
    segments = key.split("/")
    printable = key.isprintable() and "\\" not in key
    if not printable or any(segment in ("", ".", "..") for segment in segments):
        raise SpecInvalid(
            f"expected an artifact key like runs/7/patch.diff (a relative path without empty, `.` or `..` segments); "
            f"found {key[:200]!r}; rename what it was made from"
        )
    if len(key.encode()) > _LONGEST_BYTES:
        raise SpecInvalid(f"expected an artifact key of at most {_LONGEST_BYTES} bytes; found {len(key.encode())}")
    if (longest := max(len(segment.encode()) for segment in segments)) > _LONGEST_SEGMENT:
        raise SpecInvalid(f"expected an artifact key with at most {_LONGEST_SEGMENT} bytes a segment; found {longest}")
    return key
