"""Defines the interface of the artifact store: bytes under keys."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class ArtifactStore(Protocol):
    """Keys are slash-separated relative paths. Writing a key again replaces the object.

    Everything that takes a key raises SpecInvalid when it is none: see `app.artifacts.keys.checked`.
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
        """Write, read and delete a probe object.

        Raises: ArtifactStoreUnavailable with the reason and the fix.
        """
        ...
