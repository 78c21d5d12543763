"""Defines the interface of the artifact store: bytes under keys."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from app.errors import SpecInvalid

_LONGEST_BYTES = 1000  # S3 takes 1024, a prefix included
_LONGEST_SEGMENT = 255  # of a file's name


class ArtifactStore(Protocol):
    """Bytes under relative paths, replaced when written again. Raises (every method): SpecInvalid: see `checked`."""

    def put(self, key: str, content: bytes) -> str:
        """Store `content`, durably; its URL (`file://`, `s3://`, …). Raises: ArtifactStoreUnavailable, DiskFull."""
        ...

    def put_file(self, key: str, file: Path) -> str:
        """As `put`, without having all of the file in memory. Raises: ArtifactStoreUnavailable, DiskFull."""
        ...

    def create(self, key: str, content: bytes) -> bool:
        """As `put`, only where nothing is; False: something was. Raises: ArtifactStoreUnavailable, DiskFull."""
        ...

    def get(self, key: str) -> bytes:
        """Raises: ArtifactMissing, ArtifactStoreUnavailable."""
        ...

    def exists(self, key: str) -> bool:
        """Raises: ArtifactStoreUnavailable."""
        ...

    def url(self, key: str) -> str:
        """Where `key` is, or would be."""
        ...

    def link(self, key: str, expires_s: float) -> str | None:
        """A URL that gives the object as a file for `expires_s`, unproven that it is there; None: none is made here."""
        ...

    def check(self) -> None:
        """Write, read and delete a probe object. Raises: ArtifactStoreUnavailable with the reason and the fix."""
        ...


def checked(key: str) -> str:
    """`key` itself, when it stays below the store's root and means one object. Raises: SpecInvalid."""
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
