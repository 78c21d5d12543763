"""What a way into a container must give, and what those with a helper share."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from docker.errors import APIError, DockerException
from docker.types import Mount
from requests import RequestException

from app.environments.prebuilt import HelperUnavailable, binary
from app.environments.session import Connect, SessionClient, SessionStats
from app.errors import EnvironmentFailed
from app.host.engine import Engine
from app.models.shell import CommandResult, InteractiveProgram, OutputLogs, StatefulShell

ORPHAN_EXIT_S = 60
"""A container whose worker has vanished (no connection left) ends itself after so long."""
_READY_S = 20.0
_UNPROVEN_S = 8.0


class Session(Protocol):
    """The inside of one running container, as `Shell` describes it. Raises EnvironmentFailed once it was closed."""

    logs: OutputLogs | None  # where all of a command's long output goes

    def run(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float,
        stdin: bytes | None = None,
    ) -> CommandResult: ...
    def shell(self, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> StatefulShell: ...
    def stream(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        tty: bool = False,
        rows: int = 24,
        columns: int = 80,
    ) -> InteractiveProgram: ...
    def put(self, path: str, content: bytes, *, mode: int = 0o644) -> None: ...
    def get(self, path: str) -> bytes: ...
    def put_tree(self, archive: bytes, path: str) -> None: ...
    def get_tree(self, path: str) -> bytes: ...
    def stats(self) -> SessionStats: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Inside:
    """What a session holds for every command."""

    container_id: str
    cwd: str
    user: str | None  # whom the image wants its commands run as; None: root


class WayClosed(EnvironmentFailed):
    """This way does not lead into this engine's containers."""


class Entrance(Protocol):
    """The way into one container, over all its starts. `close` ends what it holds on this host."""

    first_process: list[str]
    mounts: list[Mount]
    shares_files: bool  # the engine sees files of this host: what else is to be seen inside is mounted, too

    def before_start(self, container_id: str) -> None:
        """Once before each start."""
        ...

    def open(self, inside: Inside, *, proven: bool) -> Session:
        """Once after each start. Raises: WayClosed."""
        ...

    def init(self) -> int | None:
        """The container's first process by this host's numbers, as the last start has it; None: not to be seen."""
        ...

    def close(self) -> None: ...


class Way(Protocol):
    """Makes entrances."""

    def __init__(self, engine: Engine, home: Path) -> None:
        """Raises: WayClosed."""
        ...

    def entrance(self) -> Entrance: ...

    def blamed_for(self, error: APIError) -> bool:
        """Whether the engine refused a container because of what this way wants of it."""
        ...


def binary_for(engine: Engine, home: Path) -> Path:
    """Raises: WayClosed."""
    try:
        return binary(home, engine.architecture)
    except HelperUnavailable as error:
        raise WayClosed(str(error)) from error


def opened(connect: Connect, inside: Inside, deadline: float) -> SessionClient:
    client = SessionClient(connect, label=inside.container_id[:12], cwd=inside.cwd, user=inside.user)
    try:
        client.wait_ready(max(0.1, deadline - time.monotonic()))
    except BaseException as error:
        client.close()
        if isinstance(error, EnvironmentFailed):
            raise WayClosed(str(error)) from error
        raise
    return client


def running(engine: Engine, container_id: str) -> bool:
    try:
        return bool(engine.api.inspect_container(container_id)["State"]["Running"])
    except (DockerException, RequestException):
        return False


def patience_s(*, proven: bool) -> float:
    """How long a helper may take to answer: less while another way may be the right one."""
    return _READY_S if proven else _UNPROVEN_S
