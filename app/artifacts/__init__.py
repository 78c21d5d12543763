"""Stores evidence: in a folder, in S3, in Azure Blob Storage or in Google Cloud Storage."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from app.artifacts.base import ArtifactStore
from app.artifacts.folder import FolderStore
from app.errors import SettingsInvalid

__all__ = ["ArtifactStore", "open_store"]

_EXPECTED = "expected artifacts at file:///folder, s3://bucket/prefix, az://container/prefix or gs://bucket/prefix"


def open_store(url: str, *, endpoint_url: str | None = None, create_bucket: bool = False) -> ArtifactStore:
    """Returns the store at `url`. Accesses nothing until the first call; `create_bucket` creates the bucket now.

    Raises: SettingsInvalid: not a URL of a store. ArtifactStoreUnavailable: the bucket could not be created.
        DependencyMissing: the store needs the extra `stores`.
    """
    parts = urlsplit(url)
    if parts.query or parts.fragment or parts.password:
        raise SettingsInvalid(f"{_EXPECTED}; found a query, a fragment or a password in it; leave those out")
    match parts.scheme:
        case "file":
            return _folder(url, unquote(parts.path), parts.netloc)
        case "s3":
            return _bucket(url, parts.netloc, unquote(parts.path), endpoint_url, create_bucket)
        case "az" | "gs" if parts.netloc:
            from app.artifacts.cloud import CloudStore  # needs the package of an extra

            return CloudStore(parts.scheme, parts.netloc, unquote(parts.path))
        case _:
            raise SettingsInvalid(f"{_EXPECTED}; found {url!r}; set MEGAFLOW_ARTIFACTS_URL")


def _folder(url: str, path: str, host: str) -> FolderStore:
    if host not in ("", "localhost") or not path.startswith("/"):
        raise SettingsInvalid(f"{_EXPECTED}, an absolute path on this host; found {url!r}; write three slashes")
    return FolderStore(Path(path))


def _bucket(url: str, bucket: str, prefix: str, endpoint_url: str | None, create: bool) -> ArtifactStore:
    from app.artifacts.s3 import S3Store  # importing boto3 takes half a second; most commands do not need it

    if not bucket:
        raise SettingsInvalid(f"{_EXPECTED}; found {url!r} without a bucket")
    store = S3Store(bucket, prefix, endpoint_url=endpoint_url)
    if create:
        store.create_bucket()
    return store
