"""Defines the fixture of the suite: one implementation, how to create it, and which abilities it lacks."""

from __future__ import annotations

import io
import tarfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import pytest
from docker.errors import APIError

from app.environments.contract import EnvironmentProvider, Tags
from app.environments.sweeper import Sweeper
from app.errors import EngineUnavailable
from app.host.engine import engine_of
from app.models.spec import EnvironmentSpec
from app.settings import Settings

_TALK = (
    "import socket, sys; s = socket.create_connection(('127.0.0.1', {port}), 10); s.sendall(b'ping'); "
    "s.shutdown(socket.SHUT_WR); sys.stdout.write(s.makefile().read())"
)


@dataclass(frozen=True)
class Fixture:
    """An implementation of environments and how to create it."""

    name: str
    kind: str  # as in `describe()`
    provider: Callable[[Settings], EnvironmentProvider]
    spec: Callable[[pytest.FixtureRequest], EnvironmentSpec]
    """A small environment with sh and coreutils (and python3), the working folder /testbed and GIVEN="by the task"."""
    isolates: bool = True
    """Enforces the memory limit, and hides the host's processes."""
    bounds_processes: bool = True
    """Enforces the process limit, where it isolates."""
    has_terminals: bool = True
    """`stream(tty=True)` gives a terminal."""
    forwards: bool = True
    """`forward` works; where it does not, it is refused."""
    shares: bool = True
    """Creates environments with a read-only root; a fixture that cannot must refuse to."""
    own_commands: bool = True
    """Runs commands in its own way. If it uses another fixture's, only that one is tested with floods and bombs."""
    shows_tools: bool = False
    """The provider finds the tool NAME in `settings.home`/tools/NAME, and the environments see it."""
    mounts_tools: bool = False
    """Commands inside cannot change a tool."""
    talk: str = f'python3 -c "{_TALK}"'
    """A command that sends `ping` to {port} of the loopback, closes its sending side, and prints the answer."""
    settings: Callable[[Settings], Settings] = lambda settings: settings
    """Returns the settings for the provider, from the suite's settings."""
    marks: tuple[pytest.MarkDecorator, ...] = ()

    def param(self) -> object:
        return pytest.param(self, id=self.name, marks=self.marks)


def tar_of(files: dict[str, bytes]) -> bytes:
    """Returns a tar of these files; scripts (`.sh`) are executable."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755 if name.endswith(".sh") else 0o644
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def tags_of(installation: str) -> Tags:
    """Returns tags of an attempt without a record, with a deadline in ten minutes."""
    return Tags(installation, uuid.uuid4(), uuid.uuid4(), uuid.uuid4(), uuid.uuid4(), time.time() + 600)


def sweep_all(settings: Settings) -> int:
    """Removes every environment of an installation, as if all instances had ended long ago; returns their number."""
    removed = Sweeper(settings).sweep(set(), read_at=time.time() + 3600).removed
    with suppress(EngineUnavailable):
        engine = engine_of(settings)
        for network in engine.api.networks(filters={"label": f"megaflow={settings.installation}"}):
            with suppress(APIError):  # in use
                engine.api.remove_network(network["Id"])
    return removed
