"""Implements the artifact store in a folder, for one host or a shared file system."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from app.artifacts.base import checked
from app.errors import ArtifactMissing, ArtifactStoreUnavailable, DiskFull

_FULL = (errno.ENOSPC, errno.EDQUOT)


class FolderStore:
    """Stores objects as files below `root`. A reader sees the old or the new object, never a partial one."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def put(self, key: str, content: bytes) -> str:
        return self._put(key, lambda handle: handle.write(content))

    def put_file(self, key: str, file: Path) -> str:
        with file.open("rb") as content:
            return self._put(key, lambda handle: shutil.copyfileobj(content, handle, 1 << 20))

    def _put(self, key: str, write: Callable[[BinaryIO], object]) -> str:
        path = self._path(key)
        with self._named_errors(f"write {key}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_durably(path, write)
        return path.as_uri()

    def create(self, key: str, content: bytes) -> bool:
        path = self._path(key)
        with self._named_errors(f"write {key}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                _write_durably(path, lambda handle: handle.write(content), place=os.link)
            except FileExistsError:
                return False
        return True

    def get(self, key: str) -> bytes:
        path = self._path(key)
        with self._named_errors(f"read {key}"):
            try:
                return path.read_bytes()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                raise ArtifactMissing(f"expected the artifact {key}; found nothing at {path}") from None

    def exists(self, key: str) -> bool:
        path = self._path(key)
        with self._named_errors(f"look for {key}"):
            return path.is_file()

    def url(self, key: str) -> str:
        return self._path(key).as_uri()

    def link(self, key: str, expires_s: float) -> str | None:
        checked(key)
        return None

    def check(self) -> None:
        key = f".probe/{uuid.uuid4()}"
        self.put(key, b"probe")
        self.get(key)
        with self._named_errors("delete the probe"):
            self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self._root / checked(key)

    @contextmanager
    def _named_errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                raise DiskFull(
                    f"artifacts in {self._root}: could not {doing}: {error.strerror}; "
                    "free space there, or give another place in MEGAFLOW_ARTIFACTS_URL"
                ) from error
            raise ArtifactStoreUnavailable(
                f"artifacts in {self._root}: could not {doing}: {error}; "
                "expected a folder that this user may write to; see MEGAFLOW_ARTIFACTS_URL"
            ) from error


def _write_durably(
    path: Path, write: Callable[[BinaryIO], object], place: Callable[[str, Path], None] = os.replace
) -> None:
    """Writes to disk under a temporary name, then moves the file; when this returns, the move is on disk too."""
    descriptor, temporary = tempfile.mkstemp(prefix=".put-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as handle:
            write(handle)
            handle.flush()
            os.fsync(handle.fileno())
        place(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
