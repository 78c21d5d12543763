"""Instances in containers of the worker image, on a real stack with the embedded servers."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.instances.docker import DockerInstances
from app.models.endings import EndReason
from app.models.spec import ModelChoice
from app.models.states import AttemptState
from app.stack import lifecycle, ports
from app.stack.engine import connected
from tests.acceptance.conftest import System, bare_folder, slow_task, up
from tests.services import settings_in
from tests.waiting import eventually

pytestmark = [pytest.mark.docker, pytest.mark.extra, pytest.mark.timeout(600)]  # the first builds the worker image


@dataclass
class Stack(System):
    provider: DockerInstances

    def containers(self) -> list[str]:
        """Everything in the engine with this installation's label."""
        with connected(self.settings) as client:
            filters = {"label": f"megaflow={self.settings.installation}"}
            found = client.containers.list(all=True, filters=filters, ignore_removed=True)
            return [container.name for container in found]


@pytest.fixture(scope="module")
def stack(worker_image: str) -> Iterator[Stack]:
    """Both modes by the docker provider, in a home that other users cannot reach: its servers live behind links."""
    with bare_folder() as folder:
        closed = folder / "c"
        closed.mkdir(mode=0o700)
        providers = {"ephemeral_provider": "docker", "persistent_provider": "docker"}
        settings = settings_in(closed, **providers, worker_image=worker_image)
        assert not ports.in_use(settings)
        with up(settings) as flow:
            yield Stack(settings, flow, DockerInstances(settings))


def test_the_worker_image_brings_mini_swe_agent_with_it(stack: Stack) -> None:
    model = ModelChoice(name="replay")
    (result,) = stack.submit(selection={"only": ("access-log-report",)}, agent="mini-swe-agent", model=model).results(
        timeout=120
    )
    assert result.reward == 1.0
    assert result.end_reason is EndReason.SUBMITTED
    assert result.attempt is not None
    log = stack.settings.home / "logs" / "instances" / f"{result.attempt.instance_id}.log"
    eventually(lambda: "attempt.ended" in log.read_text(), within_s=60)
    assert "agent.installing" not in log.read_text()


def test_a_verdict_comes_from_a_grader_in_a_container(stack: Stack) -> None:
    (result,) = stack.submit(selection={"only": ("pytoolz__toolz-1",)}).results(timeout=300)
    assert result.reward == 1.0
    (grader,) = stack.rows("SELECT id, provider FROM instances WHERE mode = 'grading'")
    assert (grader.provider, grader.id in stack.provider.alive()) == ("docker", True)


def test_a_killed_instance_is_noticed_and_its_task_finishes_on_another_attempt(stack: Stack, tmp_path: Path) -> None:
    before = set(stack.provider.alive())
    (handle,) = stack.submit(dataset=str(slow_task(tmp_path))).handles
    eventually(lambda: handle.status() == "running", within_s=60)
    ((victim, container),) = [(i, c) for i, c in stack.provider.alive().items() if i not in before]
    with connected(stack.settings) as client:
        client.api.kill(container, signal=signal.SIGKILL)
    killed_at = time.monotonic()
    killed = "SELECT 1 FROM instances WHERE mode = 'ephemeral' AND state = 'failed' AND exit_code = 137"
    eventually(lambda: stack.rows(killed), within_s=60)
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
    lifecycle.down(stack.settings, print)
    assert stack.containers() == []
