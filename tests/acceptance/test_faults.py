"""Breaking things: workers killed, servers restarted, while tasks run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from app.errors import DatabaseUnavailable
from tests.acceptance.conftest import System
from tests.waiting import eventually

pytestmark = [pytest.mark.docker, pytest.mark.timeout(400)]


def _start_slow_task(system: System, folder: Path, mode: str, replicas: int = 1) -> list[Any]:
    submitted = system.json("submit", str(folder), "--agent", "oracle", "--mode", mode, "--replicas", str(replicas))
    run_id = submitted["run_id"]
    running = (
        "SELECT i.handle, a.id FROM attempts a JOIN instances i ON i.id = a.instance_id"
        " JOIN tasks t ON t.id = a.task_id"
        " WHERE t.run_id = :r AND a.state = 'running' AND a.phases ? 'agent_started'"
    )
    try:
        found = eventually(lambda: system.rows(running, r=run_id), "a task is at work", within_s=120)
    except AssertionError as error:
        raise AssertionError(system.megaflow("explain", run_id).stdout) from error
    return [run_id, int(found[0].handle)]


@pytest.mark.parametrize("mode", ["ephemeral", "persistent"])
def test_a_killed_worker_costs_an_attempt_and_not_the_task(
    system: System, task_folder: Callable[..., Path], mode: str
) -> None:
    folder = task_folder(f"killed-{mode}", solve="sleep 4; echo done > answer")
    run_id, pid = _start_slow_task(system, folder, mode)
    os.kill(pid, signal.SIGKILL)
    killed_at = time.monotonic()
    lost = "SELECT 1 FROM attempts a JOIN tasks t ON t.id = a.task_id WHERE t.run_id = :r AND a.state = 'lost'"
    eventually(lambda: system.rows(lost, r=run_id), within_s=10)
    assert time.monotonic() - killed_at < 8, "the loss is to be noticed by event"
    (result,) = system.results(run_id)
    assert result.reward == 1.0
    assert [attempt.state for attempt in result.attempts] == ["lost", "finished"]
    assert result.attempts[0].failure is not None
    assert "SIGKILL" in result.attempts[0].failure.message
    assert result.attempts[0].instance_id != result.attempts[1].instance_id


def test_accepted_tasks_survive_a_redis_that_loses_everything(system: System, task_folder: Callable[..., Path]) -> None:
    folder = task_folder("redis", solve="sleep 1; echo done > answer")
    run_id, _ = _start_slow_task(system, folder, "persistent", replicas=12)
    with redis.Redis.from_url(system.settings.redis()) as client:
        client.flushall()
    os.kill(system.pid("redis"), signal.SIGKILL)
    results = system.results(run_id, 180)
    assert [result.reward for result in results] == [1.0] * 12


def test_tasks_run_on_through_a_restart_of_postgresql(system: System, task_folder: Callable[..., Path]) -> None:
    folder = task_folder("postgres", solve="sleep 3; echo done > answer")
    run_id, _ = _start_slow_task(system, folder, "persistent", replicas=4)
    os.kill(system.pid("postgres"), signal.SIGINT)  # fast shutdown; the supervisor starts it again

    def ended() -> bool:
        try:
            return not system.rows("SELECT 1 FROM tasks WHERE run_id = :r AND finished_at IS NULL", r=run_id)
        except DatabaseUnavailable:
            return False

    eventually(ended, within_s=120)
    assert [result.reward for result in system.results(run_id)] == [1.0] * 4


def test_the_control_plane_may_die_in_the_middle_of_a_run(system: System, task_folder: Callable[..., Path]) -> None:
    folder = task_folder("control", solve="sleep 1; echo done > answer")
    run_id, _ = _start_slow_task(system, folder, "ephemeral", replicas=6)
    os.kill(system.pid("control"), signal.SIGKILL)
    assert [result.reward for result in system.results(run_id, 180)] == [1.0] * 6


@pytest.mark.extra
def test_a_lost_launcher_takes_its_instances_along_and_the_tasks_run_again(
    system: System, task_folder: Callable[..., Path]
) -> None:
    folder = task_folder("launcher", solve="sleep 4; echo done > answer")
    run_id, pid = _start_slow_task(system, folder, "ephemeral")
    os.kill(system.pid("launcher"), signal.SIGKILL)
    eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, within_s=30)
    (result,) = system.results(run_id, 120)
    assert result.reward == 1.0
    assert len(result.attempts) == 2


@pytest.mark.extra
def test_a_second_control_worker_has_no_effect(system: System, task_folder: Callable[..., Path]) -> None:
    folder = task_folder("doubled", solve="echo done > answer")
    with _another_control(system):
        submitted = system.json(
            "submit", str(folder), "--agent", "oracle", "--mode", "ephemeral", "--replicas", "8", "--wait"
        )
    assert [len(r["attempts"]) for r in submitted["results"]] == [1] * 8


@contextmanager
def _another_control(system: System) -> Iterator[None]:
    with subprocess.Popen(
        [sys.executable, "-m", "app.control.worker"],
        env=system.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as other:
        time.sleep(4)
        try:
            yield
        finally:
            other.terminate()
