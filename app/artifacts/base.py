"""Defines the interface of the artifact store: bytes under keys."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class ArtifactStore(Protocol):
    """Keys are slash-separated relative paths. Writing a key again replaces the object.

    Everything that takes a key raises SpecInvalid when it is none: see `app.artifacts.keys.checked`.
    """

    def put(self, key: str, content: bytes) -> str:
        """Store `content`, durably, and return its URL (`file://` or `s3://`).

        Raises: ArtifactStoreUnavailable, DiskFull.
        """
        ...

    def put_file(self, key: str, file: Path) -> str:
        """Store the content of `file` as `put` does, without having all of it in memory.

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

    def check(self) -> None:
        """Write, read and delete a probe object.

        Raises: ArtifactStoreUnavailable with the reason and the fix.
        """
        ...
