"""Harbor: its docker environment (`docker compose`), on a ready image.

It asks for Python 3.12. Where this runs on 3.11, two names of `typing` are lent to it from typing_extensions; the files
of it that need newer syntax are not among those that environments are made of.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import typing
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

if sys.version_info < (3, 12):
    import typing_extensions

    typing.override = typing_extensions.override  # type: ignore[attr-defined]
    typing.TypedDict = typing_extensions.TypedDict

from harbor.environments.docker.docker import DockerEnvironment
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths
from live import Live, Loop, Simple


class Harbor:
    def __init__(self, options: dict[str, Any]) -> None:
        self._image, self._loop = options["image"], Loop()

    def start(self) -> Live:
        folder = Path(tempfile.mkdtemp(prefix="mfb-harbor-"))
        name = f"mfb-{uuid4().hex[:12]}"
        for place in (folder / "environment", folder / "trial"):
            place.mkdir()
        paths = TrialPaths(folder / "trial")
        paths.mkdir()
        config = EnvironmentConfig(docker_image=self._image)
        environment = DockerEnvironment(folder / "environment", name, name, paths, config)
        self._loop.call(environment.start(force_build=False))
        return HarborLive(self._loop, environment, name, folder)

    def versions(self) -> dict[str, str]:
        return {"harbor": version("harbor")}

    def extra(self) -> dict[str, Callable[..., Any]]:
        return {}

    def close(self) -> None:
        self._loop.close()


class HarborLive(Simple):
    def __init__(self, loop: Loop, environment: DockerEnvironment, name: str, folder: Path) -> None:
        self._loop, self._environment, self._name, self._folder = loop, environment, name, folder
        self.container = f"{name}-main-1"

    def run(self, command: str) -> tuple[int, bytes]:
        done = self._loop.call(self._environment.exec(command, timeout_sec=300))
        return done.return_code, ((done.stdout or "") + (done.stderr or "")).encode()

    def put(self, path: str, content: bytes) -> None:
        with tempfile.NamedTemporaryFile() as file:
            file.write(content)
            file.flush()
            self._loop.call(self._environment.upload_file(file.name, path))

    def get(self, path: str) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "got"
            self._loop.call(self._environment.download_file(path, target))
            return target.read_bytes()

    def stop(self) -> None:
        self._loop.call(self._environment.stop(delete=True))
        self.forget()

    def forget(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def networks(self) -> list[str]:
        return [f"{self._name}_default"]


contender = Harbor
