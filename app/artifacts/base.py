"""Defines the interface of the artifact store: bytes under keys."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from app.errors import SpecInvalid

_LONGEST_BYTES = 1000  # S3 takes 1024, a prefix included
_LONGEST_SEGMENT = 255  # of a file's name


class ArtifactStore(Protocol):
    """Keys are slash-separated relative paths. Writing a key again replaces the object.

    Everything that takes a key raises SpecInvalid when it is none: see `checked`.
    """

    def put(self, key: str, content: bytes) -> str:
        """Store `content`, durably, and return its URL (`file://`, `s3://`, `az://`, `gs://`).

        Raises: ArtifactStoreUnavailable, DiskFull.
        """
        ...

    def put_file(self, key: str, file: Path) -> str:
        """Store the content of `file` as `put` does, without having all of it in memory.

        Raises: ArtifactStoreUnavailable, DiskFull.
        """
        ...

    def create(self, key: str, content: bytes) -> bool:
        """Store `content` as `put` does, but only where nothing is; False: something was. One of several writers wins.

        Raises: ArtifactStoreUnavailable, DiskFull.
        """
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
        """A URL from which anybody can fetch the object for `expires_s`, as a file; None: this store makes none.

        Whether there is such an object is not looked at.
        """
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
