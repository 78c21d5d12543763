"""The provider `process` before a real worker launcher, whose forks wait instead of working."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import psutil
import pytest

from app.instances import launcher
from app.instances.process import ProcessProvider
from app.ledger.database import Database
from app.models.instance import InstanceRequest
from app.settings import Settings, load
from app.stack.home import process_environment
from tests.contract.instances.fixture import ProviderFixture, leave
from tests.forked import SERVER
from tests.services import short_folder
from tests.waiting import eventually


def _serve(environment: dict[str, str]) -> None:
    """A launcher, whose forks are `_host`."""
    os.environ.clear()
    os.environ.update(environment)
    launcher.main(load(), "MF_TEST", _host)


def _host(request: InstanceRequest) -> int:
    folder = load().home / "logs" / "instances"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    (folder / f"{request.instance_id}.{os.getpid()}.pid").touch()
    (folder / f"{request.instance_id}.up").touch()
    end = folder / f"{request.instance_id}.end"
    while not end.exists():
        time.sleep(0.02)
    return int(end.read_text())


class ProcessFixture(ProviderFixture):
    abilities = frozenset({"codes", "grace", "lost_reply"})

    def unreachable(self) -> ProcessProvider:
        return ProcessProvider(self.settings.model_copy(update={"home": self.settings.home / "elsewhere"}))

    def made(self, instance_id: UUID) -> int:
        return sum(_lives(int(file.suffixes[-2][1:])) for file in self._marks(f"{instance_id}.*.pid"))

    def shown(self, handle: str) -> str:
        return " ".join(psutil.Process(int(handle)).cmdline())

    def end(self, instance_id: UUID, handle: str, code: int) -> None:
        leave(self.settings, instance_id, code)

    def take_away(self, handle: str) -> None:
        os.kill(int(handle), signal.SIGKILL)

    def left(self) -> list[str]:
        return [file.name for file in self._marks("*.pid") if _lives(int(file.suffixes[-2][1:]))]

    @contextmanager
    def losing_replies(self) -> Iterator[None]:
        """A socket before the launcher's that hands requests on, and closes."""
        provider = self.provider
        assert isinstance(provider, ProcessProvider)
        with short_folder() as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "s"))
            listener.listen(8)
            threading.Thread(target=self._swallow, args=(listener,), daemon=True).start()
            provider._path = folder / "s"
            yield
            provider._path = launcher.socket_path(self.settings)

    def _swallow(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client, client.makefile("rb") as lines, socket.socket(socket.AF_UNIX) as real:
                real.connect(str(launcher.socket_path(self.settings)))
                real.sendall(lines.readline())
                json.loads(real.makefile("rb").readline())  # it is carried out

    def _marks(self, pattern: str) -> list[Path]:
        return list((self.settings.home / "logs" / "instances").glob(pattern))


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def process_fixture(settings: Settings, database: Database) -> Iterator[ProcessFixture]:
    process = SERVER.Process(target=_serve, args=(process_environment(settings),))
    process.start()
    eventually(lambda: launcher.socket_path(settings).exists())
    yield ProcessFixture(settings, database, ProcessProvider(settings))
    process.terminate()
    process.join()
