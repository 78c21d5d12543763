"""Instances in containers of the worker image, on a real stack with the embedded servers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import text

import app
from app.client import MegaFlow, Run
from app.evaluation import Submission
from app.instances.docker import DockerInstances
from app.models.endings import EndReason
from app.models.spec import Mode, ModelChoice
from app.models.states import AttemptState
from app.settings import PREFIX, Settings
from app.stack import lifecycle, ports
from app.stack.engine import connected
from tests.services import free_port, missing, short_folder
from tests.waiting import eventually

pytestmark = [pytest.mark.docker, pytest.mark.extra, pytest.mark.timeout(600)]  # the first builds the worker image

ROOT = Path(app.__file__).parent.parent
DEMO = Path(app.__file__).parent / "datasets" / "demo" / "tasks"
TASKS = ("access-log-report", "csv-to-jsonl", "lost-settings")


def _say(line: str) -> None:
    print(line)


@dataclass(frozen=True)
class Stack:
    settings: Settings
    flow: MegaFlow
    provider: DockerInstances

    def submit(self, **wanted: object) -> Run:
        values = {"dataset": "demo", "agent": "oracle", "mode": Mode.EPHEMERAL} | wanted
        return self.flow.submit(Submission.model_validate(values))

    def instances(self, mode: Mode) -> list[tuple[str, int | None]]:
        """State and exit code of every instance there ever was."""
        with self.flow.database.begin() as connection:
            query = text("SELECT state, exit_code FROM instances WHERE mode = :mode ORDER BY requested_at")
            return [(row.state, row.exit_code) for row in connection.execute(query, {"mode": mode.value})]

    def containers(self) -> list[str]:
        """Everything in the engine with this installation's label."""
        with connected(self.settings) as client:
            filters = {"label": f"megaflow={self.settings.installation}"}
            found = client.containers.list(all=True, filters=filters, ignore_removed=True)
            return [container.name for container in found]


@pytest.fixture(scope="module")
def worker_image(base_image_tag: str) -> str:
    """Built when the engine has none with this content."""
    environment = os.environ | {"VENV": sys.prefix, "BASE_IMAGE": base_image_tag}
    script = str(ROOT / "scripts" / "worker-image")
    done = subprocess.run(["sh", script], env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        missing(f"the worker image: {done.stderr.strip()[-500:]}")
    return "megaflow/worker:latest"


@pytest.fixture(scope="module")
def stack(worker_image: str) -> Iterator[Stack]:
    """Both modes by the docker provider, in a home that other users cannot reach: its servers live behind links."""
    with short_folder() as folder, pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(PREFIX)]:
            patch.delenv(name)
        closed = folder / "c"
        closed.mkdir(mode=0o700)
        settings = Settings(
            home=closed / "h",
            installation=f"test-{uuid.uuid4().hex[:8]}",
            ephemeral_provider="docker",
            persistent_provider="docker",
            worker_image=worker_image,
            flower_port=free_port(),
            web_port=free_port(),
            replay_port=free_port(),
            gateway_port=free_port(),
        )
        assert not ports.in_use(settings)
        try:
            lifecycle.up(settings, _say, may_install=False)
            with MegaFlow(settings) as flow:
                yield Stack(settings, flow, DockerInstances(settings))
        finally:
            lifecycle.down(settings, _say, purge=True)


def test_the_worker_image_brings_mini_swe_agent_with_it(stack: Stack) -> None:
    model = ModelChoice(name="replay")
    (result,) = stack.submit(only=TASKS[:1], agent="mini-swe-agent", model=model).results(timeout=120)
    assert result.reward == 1.0
    assert result.end_reason is EndReason.SUBMITTED
    assert result.attempt is not None
    log = stack.settings.home / "logs" / "instances" / f"{result.attempt.instance_id}.log"
    eventually(lambda: "attempt.ended" in log.read_text(), within_s=60)
    assert "agent.installing" not in log.read_text()


def test_a_verdict_comes_from_a_grader_in_a_container(stack: Stack) -> None:
    (result,) = stack.submit(only=("pytoolz__toolz-1",)).results(timeout=300)
    assert result.reward == 1.0
    with stack.flow.database.begin() as connection:
        grader = connection.execute(text("SELECT id, provider FROM instances WHERE mode = 'grading'")).one()
    assert (grader.provider, grader.id in stack.provider.alive()) == ("docker", True)


def test_a_killed_instance_is_noticed_and_its_task_finishes_on_another_attempt(stack: Stack, tmp_path: Path) -> None:
    before = set(stack.provider.alive())
    (handle,) = stack.submit(dataset=str(slow_task(tmp_path))).handles
    eventually(lambda: handle.status() == "running", within_s=60)
    ((victim, container),) = [(i, c) for i, c in stack.provider.alive().items() if i not in before]
    with connected(stack.settings) as client:
        client.api.kill(container, signal=signal.SIGKILL)
    killed_at = time.monotonic()
    eventually(lambda: ("failed", 137) in stack.instances(Mode.EPHEMERAL), within_s=60)
    assert time.monotonic() - killed_at < 3
    result = handle.result(timeout=120)
    assert result.reward == 1.0
    assert [attempt.state for attempt in result.attempts] == [AttemptState.LOST, AttemptState.FINISHED]
    assert result.attempts[0].instance_id == victim
    assert result.attempts[0].instance_id != result.attempts[1].instance_id


def test_down_leaves_no_container(stack: Stack, tmp_path: Path) -> None:
    """Last of this file: with an instance at work and one standing."""
    eventually(lambda: len(stack.provider.alive()) == 1, within_s=60)
    run = stack.submit(dataset=str(slow_task(tmp_path)))
    eventually(lambda: run.handles[0].status() == "running", within_s=60)
    assert len(stack.provider.alive()) == 2
    lifecycle.down(stack.settings, _say)
    assert stack.containers() == []


def slow_task(folder: Path) -> Path:
    """A task of the demo whose solution takes five seconds."""
    task = folder / "slow-report"
    shutil.copytree(DEMO / TASKS[0], task)
    solution = task / "solution" / "solve.sh"
    solution.write_text(solution.read_text().replace("set -eu\n", "set -eu\nsleep 5\n"))
    return task
