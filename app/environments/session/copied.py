"""The helper is copied in, and each lane is an exec that carries bytes: for an engine elsewhere."""

from __future__ import annotations

import time
from pathlib import Path

from docker.errors import APIError
from docker.types import Mount

from app.environments.session.exec_stream import exec_stream
from app.environments.session.transport import ORPHAN_EXIT_S, Entrance, Inside, Session, binary_for, opened, patience_s
from app.errors import EnvironmentFailed
from app.host import archives
from app.host.engine import Engine

_HELPER = "/.megaflow-helper"
_SOCKET = "/dev/.megaflow-socket"


class CopiedHelper:
    """Commands go over execs that live on.

    An exec outlives a worker that is killed, and with it the container: there the sweeper ends it.
    """

    def __init__(self, engine: Engine, home: Path) -> None:
        self._engine = engine
        self._archive = archives.of_file(_HELPER, binary_for(engine, home).read_bytes(), mode=0o755)

    def entrance(self) -> Entrance:
        return CopiedEntrance(self._engine, self._archive)

    def blamed_for(self, error: APIError) -> bool:
        return _HELPER in str(error) or "exec format error" in str(error)


class CopiedEntrance:
    shares_files = False

    def __init__(self, engine: Engine, archive: bytes) -> None:
        self._engine = engine
        self._archive = archive
        self.first_process = [
            *(_HELPER, "--listen", _SOCKET),
            *("--orphan-exit", str(ORPHAN_EXIT_S)),
        ]
        self.mounts: list[Mount] = []

    def before_start(self, container_id: str) -> None:
        if not container_id:
            return
        try:
            self._engine.api.put_archive(container_id, "/", self._archive)
        except APIError as error:
            if "read-only" not in str(error):
                raise
            raise EnvironmentFailed(
                "expected `fresh` or `recycled` on an engine that does not see this host's files, found"
                " `shared-readonly`: nothing can be copied into a read-only container; use an engine on this host"
            ) from error

    def open(self, inside: Inside, *, proven: bool) -> Session:
        argv = [_HELPER, "--bridge", _SOCKET]
        deadline = time.monotonic() + patience_s(proven=proven)
        return opened(lambda: exec_stream(self._engine, inside.container_id, argv), inside, deadline)

    def init(self) -> int | None:
        """Not to be seen: the engine may be elsewhere."""
        return None

    def close(self) -> None: ...
