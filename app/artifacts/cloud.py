"""Implements the artifact store in Azure Blob Storage and Google Cloud Storage, through obstore."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from app.artifacts.base import checked
from app.errors import ArtifactMissing, ArtifactStoreUnavailable, DependencyMissing

try:
    import obstore
    from obstore.exceptions import AlreadyExistsError, BaseError
    from obstore.store import from_url
except ImportError as error:
    raise DependencyMissing(
        "expected the package obstore for artifacts at az:// or gs://, found none; try: pip install 'megaflow[stores]'"
    ) from error

_CLIENT = {"connect_timeout": "3s", "read_timeout": "30s", "timeout": "1h", "allow_http": True}
_TRIES = {"max_retries": 2, "retry_timeout": timedelta(seconds=30)}
_AS_A_FILE = {"Content-Type": "application/octet-stream", "Content-Disposition": "attachment"}
"""A browser that opens a link must not execute content that an agent wrote."""
_VARIABLES = {"az": "AZURE_STORAGE_ACCOUNT_NAME and the other AZURE_*", "gs": "GOOGLE_APPLICATION_CREDENTIALS"}


class CloudStore:
    """Objects under `prefix` in an existing container (`az`) or bucket (`gs`). Thread-safe."""

    def __init__(self, scheme: str, bucket: str, prefix: str = "") -> None:
        """Opens nothing yet. Raises: ArtifactStoreUnavailable: the vendor's variables are malformed."""
        self._base = f"{scheme}://{bucket}"
        self._prefix = prefix.strip("/")
        self._variables = _VARIABLES[scheme]
        with self._named_errors("make a client"):
            self._store: Any = from_url(self._base, client_options=_CLIENT, retry_config=_TRIES)  # type: ignore[call-overload]

    def put(self, key: str, content: bytes) -> str:
        self._put(key, content, "overwrite")
        return self.url(key)

    def put_file(self, key: str, file: Path) -> str:
        self._put(key, file, "overwrite")
        return self.url(key)

    def create(self, key: str, content: bytes) -> bool:
        try:
            self._put(key, content, "create")
        except AlreadyExistsError:
            return False
        return True

    def get(self, key: str) -> bytes:
        name = self._name(key)
        with self._named_errors(f"read {name}"):
            return bytes(obstore.get(self._store, name).bytes())

    def exists(self, key: str) -> bool:
        name = self._name(key)
        try:
            with self._named_errors(f"look for {name}"):
                obstore.head(self._store, name)
        except ArtifactMissing:
            self._require_bucket()
            return False
        return True

    def url(self, key: str) -> str:
        return f"{self._base}/{self._name(key)}"

    def link(self, key: str, expires_s: float) -> str | None:
        name = self._name(key)
        try:
            url: str = obstore.sign(self._store, "GET", name, timedelta(seconds=expires_s))
        except (BaseError, ValueError):  # these credentials have no key for signing
            return None
        return url

    def check(self) -> None:
        key = f".probe/{uuid.uuid4()}"
        self.put(key, b"probe")
        self.get(key)
        with self._named_errors("delete the probe"):
            obstore.delete(self._store, self._name(key))

    def _put(self, key: str, content: bytes | Path, mode: Any) -> None:
        name = self._name(key)
        with self._named_errors(f"write {name}"):
            # Content in memory is sent in one request: an interrupted request leaves nothing behind.
            pieces = None if isinstance(content, Path) else False
            obstore.put(self._store, name, content, mode=mode, attributes=_AS_A_FILE, use_multipart=pieces)

    def _require_bucket(self) -> None:
        """Raises an error if the bucket is missing: the response for a missing object is the same."""
        try:
            with self._named_errors("find the bucket"):
                next(iter(obstore.list(self._store, f"{self._prefix}/" if self._prefix else None, chunk_size=1)), None)
        except ArtifactMissing as error:
            raise ArtifactStoreUnavailable(self._complaint("find the bucket", "no such bucket")) from error

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{checked(key)}" if self._prefix else checked(key)

    @contextmanager
    def _named_errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise ArtifactMissing(f"{self._base}: could not {doing}: nothing there") from error
        except AlreadyExistsError:
            raise
        except (BaseError, ValueError, OSError) as error:
            raise ArtifactStoreUnavailable(self._complaint(doing, str(error))) from error

    def _complaint(self, doing: str, found: str) -> str:
        return (
            f"{self._base}: could not {doing}: {found}; expected a bucket or container that these credentials may use; "
            f"see MEGAFLOW_ARTIFACTS_URL and {self._variables}"
        )
