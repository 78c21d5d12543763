"""Implements the artifact store in S3 and servers with the S3 protocol."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from app.artifacts.base import checked
from app.errors import ArtifactMissing, ArtifactStoreUnavailable

_CONNECT_TIMEOUT_S = 3.0
_READ_TIMEOUT_S = 30.0
_TRIES = 3
_ABSENT = {"404", "NoSuchKey", "NotFound"}
_TAKEN = {"PreconditionFailed", "ConditionalRequestConflict"}
_FALLBACK_REGION = "us-east-1"  # requests must be signed for a region; servers other than AWS ignore it


class S3Store:
    """Objects under `prefix` in `bucket`. Credentials come from boto3's default chain. Thread-safe."""

    def __init__(self, bucket: str, prefix: str = "", *, endpoint_url: str | None = None) -> None:
        """Opens no connection. Raises: ArtifactStoreUnavailable: the endpoint or boto3's settings are malformed."""
        self._bucket = bucket
        self._prefix = prefix.strip("/")
        self._where = f"s3://{bucket} at {endpoint_url or 'AWS'}"
        with self._named_errors("make a client"):
            self._client: Any = _client(endpoint_url)

    def put(self, key: str, content: bytes) -> str:
        name = self._name(key)
        with self._named_errors(f"write {name}"):
            self._client.put_object(Bucket=self._bucket, Key=name, Body=content)
        return self.url(key)

    def put_file(self, key: str, file: Path) -> str:
        name = self._name(key)
        with file.open("rb") as content, self._named_errors(f"write {name}"):
            self._client.put_object(Bucket=self._bucket, Key=name, Body=content)
        return self.url(key)

    def create(self, key: str, content: bytes) -> bool:
        name = self._name(key)
        try:
            with self._named_errors(f"write {name}"):
                self._client.put_object(Bucket=self._bucket, Key=name, Body=content, IfNoneMatch="*")
        except ArtifactStoreUnavailable as error:
            if isinstance(error.__cause__, ClientError) and _code(error.__cause__) in _TAKEN:
                return False
            raise
        return True

    def get(self, key: str) -> bytes:
        name = self._name(key)
        with self._named_errors(f"read {name}"):
            response = self._client.get_object(Bucket=self._bucket, Key=name)
            content: bytes = response["Body"].read()
        return content

    def exists(self, key: str) -> bool:
        name = self._name(key)
        try:
            with self._named_errors(f"look for {name}"):
                self._client.head_object(Bucket=self._bucket, Key=name)
        except ArtifactMissing:
            # The response to HEAD is the same for a missing bucket and a missing object.
            self._require_bucket()
            return False
        return True

    def url(self, key: str) -> str:
        return f"s3://{self._bucket}/{self._name(key)}"

    def link(self, key: str, expires_s: float) -> str | None:
        name = self._name(key)
        values = {"Bucket": self._bucket, "Key": name}
        # A browser that opens the link must not execute content that an agent wrote.
        values |= {"ResponseContentType": "application/octet-stream", "ResponseContentDisposition": "attachment"}
        with self._named_errors(f"sign a link to {name}"):
            return str(self._client.generate_presigned_url("get_object", Params=values, ExpiresIn=int(expires_s)))

    def check(self) -> None:
        key = f".probe/{uuid.uuid4()}"
        self.put(key, b"probe")
        self.get(key)
        with self._named_errors("delete the probe"):
            self._client.delete_object(Bucket=self._bucket, Key=self._name(key))

    def create_bucket(self) -> None:
        """Creates the bucket unless it exists. No other code creates buckets. Raises: ArtifactStoreUnavailable."""
        region = self._client.meta.region_name
        outside = {} if region == _FALLBACK_REGION else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        with self._named_errors("make the bucket"):
            try:
                self._client.create_bucket(Bucket=self._bucket, **outside)
            except (self._client.exceptions.BucketAlreadyOwnedByYou, self._client.exceptions.BucketAlreadyExists):
                self._client.head_bucket(Bucket=self._bucket)  # the bucket exists; check the access

    def _require_bucket(self) -> None:
        try:
            with self._named_errors("find the bucket"):
                self._client.head_bucket(Bucket=self._bucket)
        except ArtifactMissing as error:
            raise ArtifactStoreUnavailable(self._complaint("find the bucket", "no such bucket")) from error

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{checked(key)}" if self._prefix else checked(key)

    @contextmanager
    def _named_errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            if _code(error) in _ABSENT:
                raise ArtifactMissing(f"{self._where}: could not {doing}: nothing there") from error
            raise ArtifactStoreUnavailable(self._complaint(doing, str(error))) from error
        except (BotoCoreError, ValueError) as error:
            raise ArtifactStoreUnavailable(self._complaint(doing, str(error))) from error

    def _complaint(self, doing: str, found: str) -> str:
        return (
            f"{self._where}: could not {doing}: {found}; expected a bucket that these credentials may use; "
            "see MEGAFLOW_ARTIFACTS_URL, MEGAFLOW_S3_ENDPOINT_URL and the AWS_* variables"
        )


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", "?"))


def _client(endpoint_url: str | None) -> Any:
    session = boto3.session.Session()
    config = Config(
        connect_timeout=_CONNECT_TIMEOUT_S,
        read_timeout=_READ_TIMEOUT_S,
        retries={"mode": "standard", "total_max_attempts": _TRIES},
        max_pool_connections=32,
        # Servers other than AWS may lack the newer checksums and a host name per bucket.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path" if endpoint_url else "auto"},
    )
    region = session.region_name or _FALLBACK_REGION
    return session.client("s3", endpoint_url=endpoint_url, region_name=region, config=config)
