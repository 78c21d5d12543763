"""Looks through the engine at what was changed in a stopped container whose own layer is not seen from this host.

The engine tells which paths were changed and gives their files, but can remove none. So hardly anything is put back
here: only files that are without effect when they are empty. What else would be put back is suspect.
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
"""How the engine's list of changes marks them."""
_GO_FOLDER, _GO_LINK, _GO_TYPE = 1 << 31, 1 << 27, 0x8F280000
"""Of the modes that the engine's Go has."""
_READ_BYTES = 64 << 10
HARMLESS = re.compile(r"/__pycache__/[^/]+$|^/etc/ld\.so\.(?:preload|cache|conf\.d/[^/]+)$")
"""Python compiles a module again, and the loader does without, where such a file is empty or gone."""


def put_back(engine: Engine, container_id: str, decide: DecideFile) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Have `decide` look at each changed file; paths emptied, paths suspect. Raises: APIError; OSError."""
    changes: Sequence[Mapping[str, Any]] = engine.api.diff(container_id) or []
    layer = _Layer(engine, container_id, {str(one["Path"]): int(one["Kind"]) for one in changes})
    emptied, suspect = [], []
    for path, kind in layer.kinds.items():
        action = decide(UnseenFile(path, kind != _ADDED, kind == _DELETED, layer))
        if action is FileAction.KEEP or (kind != _DELETED and layer.is_a(_GO_FOLDER, path)):
            continue  # a folder is called changed when something in it is, and what is in it is told as well
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
    """One path of the engine's list of changes; see `app.models.shell.ChangedFile`."""

    path: str
    in_image: bool
    deleted: bool
    layer: _Layer

    @property
    def removable(self) -> bool:
        return False

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
        """What was not changed is as in the image. As everywhere, nothing is reached by a link."""
        if path in self.kinds:
            return self.kinds[path] != _ADDED
        for folder in PurePosixPath(path).parents:
            if self.kinds.get(str(folder)) == _ADDED or self.is_a(_GO_LINK, str(folder)):
                return False
        return self.mode(path) is not None

    def mode(self, path: str) -> int | None:
        """With the bits of Go; None: there is nothing."""
        if path not in self._modes:
            with self._answer("HEAD", path) as (mode, _):
                self._modes[path] = mode
        return self._modes[path]

    def is_a(self, kind: int, path: str) -> bool:
        """Whether there is something of that kind, one of Go's bits."""
        return bool((self.mode(path) or 0) & kind)

    def read(self, path: str) -> bytes | None:
        """Its first 64 KiB; None for a link and where there is nothing of that name. Raises: OSError."""
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
        """A path's mode, None where the engine knows none such, and it as a tar. Raises: RequestException."""
        api = self.engine.api
        url = f"{api.base_url}/v{api.api_version}/containers/{self.container_id}/archive"
        plain = {"Accept-Encoding": "identity"}
        with api.request(method, url, params={"path": path}, headers=plain, stream=True, timeout=api.timeout) as answer:
            if answer.status_code == HTTPStatus.NOT_FOUND:
                yield None, None
                return
            answer.raise_for_status()
            about = json.loads(base64.b64decode(answer.headers["X-Docker-Container-Path-Stat"]))
            yield int(about["mode"]), answer.raw
