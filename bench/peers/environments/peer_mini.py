"""mini-swe-agent: its DockerEnvironment with its defaults. One `docker run`, one `docker exec` per command."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from live import Live, WithoutFiles
from minisweagent.environments.docker import DockerEnvironment


class Mini:
    def __init__(self, options: dict[str, Any]) -> None:
        self._image = options["image"]
        logging.getLogger("minisweagent").setLevel(logging.WARNING)

    def start(self) -> Live:
        return MiniLive(DockerEnvironment(image=self._image))

    def versions(self) -> dict[str, str]:
        return {"mini-swe-agent": version("mini-swe-agent")}

    def extra(self) -> dict[str, Callable[..., Any]]:
        return {}

    def close(self) -> None:
        pass


class MiniLive(WithoutFiles):
    def __init__(self, environment: DockerEnvironment) -> None:
        self._environment = environment
        self.container = environment.container_id or ""

    def run(self, command: str) -> tuple[int, bytes]:
        done = self._environment.execute({"command": command}, timeout=300)
        return done["returncode"], done["output"].encode()

    def stop(self) -> None:
        """Returns at once: `docker stop` goes on in a shell of its own."""
        self._environment.cleanup()
        self.forget()

    def forget(self) -> None:
        self._environment.container_id = None  # its finaliser would stop it once more


contender = Mini
