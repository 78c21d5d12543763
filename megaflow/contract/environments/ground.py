"""What the suite runs on: one implementation, how to make it, and what it says it cannot do."""

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
class Ground:
    """One implementation and how to make it."""

    name: str
    kind: str  # what `describe()` says
    provider: Callable[[Settings], EnvironmentProvider]
    spec: Callable[[pytest.FixtureRequest], EnvironmentSpec]
    """A small environment with sh and coreutils (and python3), the working folder /testbed and GIVEN="by the task"."""
    isolates: bool = True
    """Its limit of memory holds, and its processes do not see the host's."""
    bounds_processes: bool = True
    """So does its limit of processes, where it isolates."""
    has_terminals: bool = True
    """`stream(tty=True)` gives one."""
    forwards: bool = True
    """`forward` works; where it does not, it is refused."""
    shares: bool = True
    """It makes environments whose root is read-only; where it does not, it refuses to."""
    own_commands: bool = True
    """Its commands run in a way of its own; where they run in another ground's, floods and bombs are left to that."""
    shows_tools: bool = False
    """Its provider finds the tool NAME in `settings.home`/tools/NAME, and its environments see it."""
    mounts_tools: bool = False
    """Commands inside cannot change one."""
    talk: str = f'python3 -c "{_TALK}"'
    """A command that sends `ping` to {port} of the loopback, ends its side, and prints what comes back."""
    settings: Callable[[Settings], Settings] = lambda settings: settings
    """What its provider makes of the suite's settings."""
    marks: tuple[pytest.MarkDecorator, ...] = ()

    def param(self) -> object:
        return pytest.param(self, id=self.name, marks=self.marks)


def tar_of(files: dict[str, bytes]) -> bytes:
    """A tar of these files; scripts (`.sh`) may be run."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755 if name.endswith(".sh") else 0o644
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def tags_of(installation: str) -> Tags:
    """Of an attempt without a record, with a deadline in ten minutes."""
    return Tags(installation, uuid.uuid4(), uuid.uuid4(), uuid.uuid4(), uuid.uuid4(), time.time() + 600)


def sweep_all(settings: Settings) -> int:
    """Remove every environment of an installation, as if all its instances had ended long ago; how many there were."""
    removed = Sweeper(settings).sweep(set(), read_at=time.time() + 3600).removed
    with suppress(EngineUnavailable):
        engine = engine_of(settings)
        for network in engine.api.networks(filters={"label": f"megaflow={settings.installation}"}):
            with suppress(APIError):  # in use
                engine.api.remove_network(network["Id"])
    return removed
