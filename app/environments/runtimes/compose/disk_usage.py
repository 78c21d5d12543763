"""What a whole project writes: its containers' own files and its volumes, together under the task's one disk limit."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from app.environments.runtimes.compose.resources import Ground
from app.environments.runtimes.compose.service import Peer
from app.environments.runtimes.docker.container import DockerEnvironment
from app.errors import EnvironmentFailed
from app.host.container_layer import usage_of
from app.host.disk import DiskUsage


class Footprint:
    """For the disk watch, from before the first container is made. Whoever makes it keeps it as long as the project.

    `main`: as soon as there is one.
    """

    def __init__(self, ground: Ground, peers: Iterable[Peer]) -> None:
        self._ground = ground
        self._peers = tuple(peers)
        self._ended = threading.Event()
        self.main: DockerEnvironment | None = None

    @property
    def id(self) -> str:
        """The environment's; while it is made the project's."""
        return self._ground.id if self.main is None else self.main.id

    @property
    def gone(self) -> bool:
        return self._ended.is_set() or self._ground.fate is not None

    def end(self) -> None:
        """Nobody need look any more."""
        self._ended.set()

    def written(self) -> DiskUsage:
        """Raises: EnvironmentFailed, EngineUnavailable."""
        engine, containers = self._ground.engine, self._ground.created().containers
        with engine.named("look where services write", EnvironmentFailed):
            found = [engine.api.inspect_container(one) for one in containers]
        return usage_of(engine, found)

    def fail(self, why: str, *, kind: type[EnvironmentFailed] = EnvironmentFailed) -> None:
        """End all that runs, and say why to all who use any of it from now on; its owner still destroys it."""
        self._ground.fate = (kind, why)
        try:
            if self.main is not None:
                self.main.fail(why, kind=kind)
        finally:
            for peer in self._peers:
                peer.close()
            self._ground.kill()
