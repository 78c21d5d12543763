"""The launcher as a real process that forks real instances, and the provider that speaks to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from app.errors import InstanceFailed
from app.instances.process import ProcessProvider
from app.ledger import instances
from app.ledger.database import Database
from app.ledger.instances import InstanceDemand
from app.models.instance import InstanceRequest
from app.models.spec import Mode
from app.settings import Settings
from app.stack.home import process_environment
from tests.services import MakeSettings
from tests.waiting import eventually

_SERVE = """
import os, psutil, subprocess, sys, time
from app.instances import launcher
from app.settings import load
def host(request):
    os.environ["MF_TEST"] = str(request.instance_id)
    if request.slots == 2:
        subprocess.Popen(["setsid", "sleep", "600"])
    time.sleep(600)
    return 0
fork = os.fork
def slow_fork():
    pid = fork()
    if pid == 0:
        time.sleep(float(os.environ["MF_TEST_FORK_S"]))
    return pid
os.fork = slow_fork
environ = psutil.Process.environ
def told_environ(self):
    with open("environments-read", "a") as file:
        file.write(f"{self.pid} ")
    return environ(self)
psutil.Process.environ = told_environ
launcher.main(load(), "MF_TEST", host)
"""


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings(retry_base_s=0.0, drain_s=0.5)


@pytest.fixture
def launcher(settings: Settings, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**process_environment(settings), "MF_TEST_FORK_S": str(getattr(request, "param", 0))}
    with subprocess.Popen(
        [sys.executable, "-c", _SERVE], env=environment, cwd=settings.home, stdout=subprocess.DEVNULL
    ) as process:
        eventually(lambda: (settings.home / "run" / "launcher.sock").exists())
        yield process
        process.terminate()


@pytest.fixture
def provider(settings: Settings, launcher: subprocess.Popen[bytes]) -> ProcessProvider:
    return ProcessProvider(settings)


def _requested(database: Database, *, slots: int = 1, lifetime_s: float | None = None) -> InstanceRequest:
    with database.begin() as connection:
        (instance_id,) = instances.request(
            connection, InstanceDemand("process", Mode.PERSISTENT, "standard", slots, 1, lifetime_s)
        )
    return InstanceRequest(instance_id=instance_id, mode=Mode.PERSISTENT, slots=slots, lifetime_s=lifetime_s)


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_what_a_killed_worker_leaves_running_is_killed_and_of_living_ones_nothing_is_read(
    provider: ProcessProvider, database: Database, settings: Settings
) -> None:
    requests = [_requested(database, slots=2), _requested(database, slots=2)]
    killed, living = (int(pid) for pid in provider.launch(requests).values())
    (child,), (other,) = (eventually(lambda pid=pid: psutil.Process(pid).children()) for pid in (killed, living))
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: _is_gone(child.pid))
    read = (settings.home / "environments-read").read_text().split()
    assert str(child.pid) in read
    assert {str(living), str(other.pid)}.isdisjoint(read), "one that forks without end would hold the launcher up"
    assert not _is_gone(other.pid)


@pytest.mark.parametrize("launcher", [0, 1], indirect=True, ids=["begun", "just forked"])
def test_instances_do_not_outlive_a_killed_launcher(
    provider: ProcessProvider, database: Database, launcher: subprocess.Popen[bytes]
) -> None:
    request = _requested(database)
    pid = int(provider.launch([request])[request.instance_id])
    launcher.kill()
    launcher.wait()
    eventually(lambda: _is_gone(pid))
    with pytest.raises(InstanceFailed, match="megaflow up"):
        provider.alive()


def test_terminate_takes_the_whole_tree(provider: ProcessProvider, database: Database) -> None:
    request = _requested(database, slots=2)
    pid = int(provider.launch([request])[request.instance_id])
    (child,) = eventually(lambda: psutil.Process(pid).children())
    provider.terminate(request.instance_id, str(pid), grace_s=0)
    eventually(lambda: _is_gone(pid) and _is_gone(child.pid))
