"""Inspect: its docker sandbox (`docker compose`), with the compose file that it writes itself, on our image.

It refuses engines before 24.0.6 when a task begins; what a sample does is called directly, so that older ones can be
measured.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from inspect_ai.util._sandbox.docker.cleanup import project_cleanup_startup
from inspect_ai.util._sandbox.docker.docker import DockerSandboxEnvironment
from inspect_ai.util._subprocess import init_max_subprocesses
from live import Live, Loop, Simple

_COMPOSE = """services:
  default:
    image: {image}
    command: "tail -f /dev/null"
    init: true
    network_mode: none
    stop_grace_period: 1s
    x-local: true
"""


class Inspect:
    def __init__(self, options: dict[str, Any]) -> None:
        init_max_subprocesses()
        project_cleanup_startup()
        self._loop = Loop()  # takes over what was just set for this context
        self._folder = Path(tempfile.mkdtemp(prefix="mfb-inspect-"))
        self._file = self._folder / "compose.yaml"
        self._file.write_text(_COMPOSE.format(image=options["image"]))

    def start(self) -> Live:
        made = self._loop.call(DockerSandboxEnvironment.sample_init("bench", str(self._file), {}))
        return InspectLive(self._loop, made)

    def versions(self) -> dict[str, str]:
        return {"inspect-ai": version("inspect-ai")}

    def extra(self) -> dict[str, Callable[..., Any]]:
        return {}

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._loop.close()


class InspectLive(Simple):
    def __init__(self, loop: Loop, made: dict[str, Any]) -> None:
        self._loop, self._made = loop, made
        self._sandbox = made["default"].as_type(DockerSandboxEnvironment)
        self.container = f"{self._sandbox._project.name}-default-1"

    def run(self, command: str) -> tuple[int, bytes]:
        done = self._loop.call(self._sandbox.exec(["bash", "-c", command], timeout=300))
        return done.returncode, (done.stdout + done.stderr).encode()

    def put(self, path: str, content: bytes) -> None:
        self._loop.call(self._sandbox.write_file(path, content))

    def get(self, path: str) -> bytes:
        content: bytes = self._loop.call(self._sandbox.read_file(path, text=False))
        return content

    def stop(self) -> None:
        self._loop.call(DockerSandboxEnvironment.sample_cleanup("bench", None, self._made, False))


contender = Inspect
