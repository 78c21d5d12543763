"""Checks changes in a stopped container through the engine, when its layer is not visible from this host.

The engine lists changed paths and reads their files, but cannot remove any. So only files that have no effect when
empty are put back, by emptying them. All others that would be put back are suspect.
"""

from __future__ import annotations

import base64
import json
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import PurePosixPath
from typing import Any

from urllib3.exceptions import HTTPError

from app.host import archives
from app.host.engine import Engine
from app.models.shell import DecideFile, FileAction

_ADDED, _DELETED = 1, 2
"""Kinds of changes in the engine's list."""
_GO_FOLDER, _GO_LINK, _GO_TYPE = 1 << 31, 1 << 27, 0x8F280000
"""Bits of Go's file modes, which the engine uses."""
_READ_BYTES = 64 << 10
HARMLESS = re.compile(r"/__pycache__/[^/]+$|^/etc/ld\.so\.(?:preload|cache|conf\.d/[^/]+)$")
"""Paths that may be emptied: Python recompiles such a module, and the loader works without such a file."""


def put_back(engine: Engine, container_id: str, decide: DecideFile) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Calls `decide` for each changed file; returns emptied and suspect paths. Raises: APIError; OSError."""
    changes: Sequence[Mapping[str, Any]] = engine.api.diff(container_id) or []
    layer = _Layer(engine, container_id, {str(one["Path"]): int(one["Kind"]) for one in changes})
    emptied, suspect = [], []
    for path, kind in layer.kinds.items():
        action = decide(UnseenFile(path, kind != _ADDED, kind == _DELETED, layer))
        if action is FileAction.KEEP or (kind != _DELETED and layer.is_a(_GO_FOLDER, path)):
            continue  # a folder is listed as changed when an entry in it is, and that entry is listed as well
        if action is FileAction.SUSPECT or not HARMLESS.search(path):
            suspect.append(path)
        elif kind != _DELETED:
            emptied.append(path)
    if emptied:
        empty = archives.of_files({path.lstrip("/"): b"" for path in emptied}, mode=0o644)
        engine.api.put_archive(container_id, "/", empty)
    return tuple(emptied), tuple(suspect)


@dataclass(frozen=True, slots=True)
class UnseenFile:
    """Path in the engine's list of changes; see `app.models.shell.ChangedFile`."""

    path: str
    in_image: bool
    deleted: bool
    layer: _Layer

    @property
    def removable(self) -> bool:
        return False

    @property
    def target(self) -> str:
        return ""

    def image_has(self, path: str) -> bool:
        return self.layer.image_has(path)

    def read(self) -> bytes | None:
        return b"" if self.deleted else self.layer.read(self.path)


@dataclass(slots=True)
class _Layer:
    engine: Engine
    container_id: str
    kinds: dict[str, int]
    _modes: dict[str, int | None] = field(default_factory=dict)

    def image_has(self, path: str) -> bool:
        """Whether the image has a path: unchanged paths are as in the image. Links are not followed."""
        if path in self.kinds:
            return self.kinds[path] != _ADDED
        for folder in PurePosixPath(path).parents:
            if self.kinds.get(str(folder)) == _ADDED or self.is_a(_GO_LINK, str(folder)):
                return False
        return self.mode(path) is not None

    def mode(self, path: str) -> int | None:
        """Returns a path's mode with Go's bits; None: there is no such path."""
        if path not in self._modes:
            with self._answer("HEAD", path) as (mode, _):
                self._modes[path] = mode
        return self._modes[path]

    def is_a(self, kind: int, path: str) -> bool:
        """Whether a path exists and is of this kind (one of Go's bits)."""
        return bool((self.mode(path) or 0) & kind)

    def read(self, path: str) -> bytes | None:
        """Returns a path's first 64 KiB; None for a link or a missing path. Raises: OSError."""
        if (mode := self.mode(path)) is None or mode & _GO_LINK:
            return None
        if mode & _GO_TYPE:
            return b""
        try:
            with self._answer("GET", path) as (_, content), tarfile.open(fileobj=content, mode="r|") as archive:
                member = archive.next()
                file = None if member is None else archive.extractfile(member)
                return b"" if file is None else file.read(_READ_BYTES)
        except (tarfile.TarError, HTTPError) as error:
            raise OSError(f"the engine did not send all of {path[:200]!r}: {error}") from error

    @contextmanager
    def _answer(self, method: str, path: str) -> Iterator[tuple[int | None, Any]]:
        """Requests a path's mode (None: the engine has no such path) and a tar of it. Raises: RequestException."""
        api = self.engine.api
        url = f"{api.base_url}/v{api.api_version}/containers/{self.container_id}/archive"
        plain = {"Accept-Encoding": "identity"}
        with api.request(method, url, params={"path": path}, headers=plain, stream=True, timeout=api.timeout) as answer:
            if answer.status_code == HTTPStatus.NOT_FOUND:
                yield None, None
                return
            answer.raise_for_status()
            status = json.loads(base64.b64decode(answer.headers["X-Docker-Container-Path-Stat"]))
            yield int(status["mode"]), answer.raw
