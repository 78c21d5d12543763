"""SWE-bench's harness: the functions with which it makes, uses and ends the container of an evaluation."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import docker
from live import Absent, Live, Simple
from swebench.harness.docker_utils import cleanup_container, copy_to_container, exec_run_with_timeout
from swebench.harness.run_evaluation import create_container
from swebench.types import TestSpec

_LOG = logging.getLogger("swebench-harness")


class Swebench:
    def __init__(self, options: dict[str, Any]) -> None:
        self._client = docker.from_env(timeout=300, max_pool_size=64)
        self._image = options["image"]

    def start(self) -> Live:
        identity = f"mfb-{uuid4().hex[:12]}"
        spec = TestSpec(identity, self._image, [], "bench/bench", "1", [], [])
        container = create_container(spec, self._client, "bench", _LOG)
        container.start()
        return SwebenchLive(self._client, container)

    def versions(self) -> dict[str, str]:
        return {"swebench": version("swebench"), "docker": version("docker")}

    def extra(self) -> dict[str, Callable[..., Any]]:
        return {}

    def close(self) -> None:
        self._client.close()


class SwebenchLive(Simple):
    def __init__(self, client: Any, container: Any) -> None:
        self._client, self._it = client, container
        self.container = container.id

    def run(self, command: str) -> tuple[int, bytes]:
        """Its harness does not look at exit codes: 0 unless the time was up."""
        output, timed_out, _ = exec_run_with_timeout(self._it, ["bash", "-c", command], 300)
        return (124 if timed_out else 0), output.encode()

    def put(self, path: str, content: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "content"
            source.write_bytes(content)
            copy_to_container(self._it, source, Path(path))

    def get(self, path: str) -> bytes:
        raise Absent("the harness has no way to read a file")

    def stop(self) -> None:
        cleanup_container(self._client, self._it, _LOG)


contender = Swebench
