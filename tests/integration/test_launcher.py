"""The launcher as a real process that forks real instances, and the provider that speaks to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from sqlalchemy import text

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
import os, subprocess, sys, time
from app.instances import launcher
from app.settings import load
def host(request):
    os.environ["MF_TEST"] = str(request.instance_id)
    if request.slots == 2:
        subprocess.Popen(["setsid", "sleep", "600"])
    if request.slots == 3:
        return 0
    time.sleep(600)
    return 0
launcher.main(load(), "MF_TEST", host)
"""


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings(retry_base_s=0.0, drain_s=0.5)


@pytest.fixture
def launcher(settings: Settings) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", _SERVE], env=process_environment(settings), stdout=subprocess.DEVNULL
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


def _row(database: Database, request: InstanceRequest) -> Any:
    with database.begin() as connection:
        statement = text("SELECT state, exit_code FROM instances WHERE id = :i")
        return connection.execute(statement, {"i": request.instance_id}).one()


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_an_instance_is_a_process_and_its_end_is_recorded_at_once(
    provider: ProcessProvider, database: Database
) -> None:
    request = _requested(database)
    handle = provider.launch([request])[request.instance_id]
    assert provider.alive() == {request.instance_id: handle}
    os.kill(int(handle), signal.SIGKILL)
    killed_at = time.monotonic()
    eventually(lambda: _row(database, request).state == "failed")
    assert time.monotonic() - killed_at < 2
    assert provider.alive() == {}


def test_a_clean_exit_is_a_termination(provider: ProcessProvider, database: Database) -> None:
    request = _requested(database, slots=3)
    provider.launch([request])
    eventually(lambda: _row(database, request) == ("terminated", 0))


def test_asking_twice_starts_one(provider: ProcessProvider, database: Database) -> None:
    request = _requested(database)
    assert provider.launch([request]) == provider.launch([request])
    assert len(provider.alive()) == 1


def test_terminate_takes_the_whole_tree(provider: ProcessProvider, database: Database) -> None:
    request = _requested(database, slots=2)
    pid = int(provider.launch([request])[request.instance_id])
    (child,) = eventually(lambda: psutil.Process(pid).children())
    provider.terminate(request.instance_id, str(pid), grace_s=0)
    eventually(lambda: _is_gone(pid) and _is_gone(child.pid))


def test_what_a_killed_worker_leaves_running_is_killed(provider: ProcessProvider, database: Database) -> None:
    request = _requested(database, slots=2)
    pid = int(provider.launch([request])[request.instance_id])
    (child,) = eventually(lambda: psutil.Process(pid).children())
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: _is_gone(child.pid))


def test_an_instance_is_killed_at_its_deadline(provider: ProcessProvider, database: Database) -> None:
    request = _requested(database, lifetime_s=0.5)
    pid = int(provider.launch([request])[request.instance_id])
    eventually(lambda: _is_gone(pid), within_s=5)


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
