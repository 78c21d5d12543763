"""A whole installation whose instances are jobs of a real Slurm: two nodes of this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.client import Run
from app.instances.slurm import SlurmInstances
from app.models.spec import Mode
from app.models.states import AttemptState
from app.stack import lifecycle
from tests.acceptance.conftest import System, bare_folder, slow_task, up
from tests.services import settings_in
from tests.slurm_cluster import SlurmCluster, slurm_cluster
from tests.waiting import eventually

pytestmark = [pytest.mark.docker, pytest.mark.extra, pytest.mark.timeout(600)]

TASK = "access-log-report"
_QUEUE_S = 15.0


@dataclass
class Stack(System):
    provider: SlurmInstances
    cluster: SlurmCluster

    def ends(self, mode: Mode, resource_class: str = "standard") -> list[tuple[str, int | None, str]]:
        """State, exit code and reason of every instance that has ended."""
        found = self.rows(
            "SELECT i.state, i.exit_code, e.data->>'why' AS why FROM instances i JOIN events e"
            " ON e.instance_id = i.id AND e.kind IN ('instance.failed', 'instance.terminated')"
            " WHERE i.mode = :mode AND i.resource_class = :class ORDER BY e.id",
            **{"mode": mode.value, "class": resource_class},
        )
        return list(map(tuple, found))

    def jobs(self) -> list[str]:
        return self.cluster.ask("squeue", "--noheader", "--array", "--format=%i %T").splitlines()


@pytest.fixture(scope="module")
def stack(base_image_tag: str) -> Iterator[Stack]:
    with bare_folder() as folder, slurm_cluster() as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(cluster.conf))
        settings = settings_in(
            folder,
            ephemeral_provider="slurm",
            persistent_provider="slurm",
            ephemeral_capacity=4,
            slurm_arguments="--cpus-per-task=2 --mem=500M",
            slurm_class_arguments={"late": "--partition=closed"},
            queue_timeout_s=_QUEUE_S,
            sweep_s=1.0,
        )
        with up(settings) as flow:
            yield Stack(settings, flow, SlurmInstances(settings), cluster)


@pytest.mark.parametrize("mode", [Mode.EPHEMERAL, Mode.PERSISTENT])
def test_the_demo_is_solved_on_jobs(stack: Stack, mode: Mode) -> None:
    results = stack.submit(mode=mode).results(timeout=500)
    assert len(results) >= 12
    assert {result.reward for result in results} == {1.0}
    if mode is Mode.EPHEMERAL:
        eventually(lambda: len(stack.ends(mode)) >= len(results), "their ends on record")
        assert [end for end in stack.ends(mode) if end[:2] != ("terminated", 0)] == []


def _running(stack: Stack, folder: Path) -> tuple[Run, str]:
    """A run of one task of a minute at most, and the handle of its instance."""
    before = set(stack.provider.alive())
    run = stack.submit(dataset=str(slow_task(folder, 8)))
    eventually(lambda: run.handles[0].status() == "running", within_s=120)
    ((_, handle),) = [(i, h) for i, h in stack.provider.alive().items() if i not in before]
    return run, handle


def test_a_node_that_is_taken_away_costs_an_attempt_and_no_task(stack: Stack, tmp_path: Path) -> None:
    run, handle = _running(stack, tmp_path)
    node = stack.cluster.node_of(handle)
    stack.cluster.take_node(node)
    try:
        result = run.handles[0].result(timeout=200)
        assert result.reward == 1.0
        assert [attempt.state for attempt in result.attempts] == [AttemptState.LOST, AttemptState.FINISHED]
    finally:
        stack.cluster.start_node(node)
    eventually(lambda: [why for _, _, why in stack.ends(Mode.EPHEMERAL) if "NODE_FAIL" in why])


def test_a_controller_that_restarts_costs_nothing(stack: Stack, tmp_path: Path) -> None:
    run, _ = _running(stack, tmp_path)
    stack.cluster.stop_controller()
    more = stack.submit(selection={"only": (TASK,)})  # no worker takes its job now
    time.sleep(5)
    stack.cluster.start_controller()
    assert [len(result.attempts) for result in run.results(timeout=200)] == [1]
    assert [result.reward for result in more.results(timeout=200)] == [1.0]


def test_down_leaves_no_job(stack: Stack) -> None:
    """Last of this file: with an instance standing."""
    eventually(lambda: stack.jobs(), "the standing instance")
    lifecycle.down(stack.settings, print)
    eventually(lambda: stack.jobs() == [])
