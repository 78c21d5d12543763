"""The demo's tasks in pods, as a user submits them, through the tests' API server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker
import pytest

from app import evaluation
from app.artifacts import open_store
from app.artifacts.bundles import fetch_bundle
from app.images.references import built_for_all
from app.images.task_images import Images
from app.models.spec import AgentTask, EnvironmentKind, EnvironmentSpec, TestsGoal
from tests.acceptance.conftest import System, running
from tests.kubernetes import FakeCluster
from tests.waiting import eventually

pytestmark = [pytest.mark.docker, pytest.mark.extra, pytest.mark.timeout(600)]

MIRROR = "registry.invalid/megaflow-test"
IN_PLACE = ("csv-to-jsonl", "order-ledger")
"""Graded in the agent's own pod; a task with tests of a repository is graded from a patch, in another."""


@contextmanager
def built_for_nodes(system: System, tasks: list[AgentTask]) -> Iterator[None]:
    """Have their images under the names by which nodes pull them, as `megaflow images sync` does in a registry."""
    here = system.settings.model_copy(update={"image_mirror": None})
    store, engine = open_store(here.artifacts()), docker.from_env()
    images = Images(here, fetch_bundle=lambda bundle: fetch_bundle(store, bundle))
    builds = [build for task in tasks if (build := task.environment.build) is not None]
    names = [built_for_all(MIRROR, build, here.base_image) for build in builds]
    for name, build in zip(names, builds, strict=True):
        repository, _, tag = name.rpartition(":")
        engine.api.tag(images.ensure(EnvironmentSpec(build=build), timeout_s=200), repository, tag)
    yield
    for name in names:
        engine.api.remove_image(name)
    engine.close()


def test_the_demo_is_graded_right_in_pods(base_image_tag: str, tmp_path: Path) -> None:
    changes = {"kubernetes_environments": "default", "image_mirror": MIRROR}
    with FakeCluster() as cluster, running(base_image_tag, kubeconfig=cluster.kubeconfig(tmp_path), **changes) as pods:
        demo = evaluation.demo_tasks(pods.settings, EnvironmentKind.KUBERNETES)
        patched = next(task for task in demo if isinstance(task.goal, TestsGoal))
        tasks = [*(task for task in demo if task.name in IN_PLACE), patched]
        with built_for_nodes(pods, tasks):
            solved_and_not(pods, tasks)
        eventually(lambda: not cluster.objects("pods"), "every pod to be gone")
        lines = pods.rows("SELECT kind, destroyed_at IS NULL AS stands FROM created_resources")
        assert {(line.kind, line.stands) for line in lines} == {("pod", False)}


def solved_and_not(pods: System, tasks: list[AgentTask]) -> None:
    for agent, reward in (("oracle", 1.0), ("nop", 0.0)):
        run = pods.flow.enqueue_many(tasks, agent=agent, mode="persistent")
        results = [handle.result(timeout=200) for handle in run.handles]
        verdicts = [result.verdict for result in results]
        assert [verdict and (verdict.reward, verdict.suspect) for verdict in verdicts] == [(reward, "")] * 3, [
            r.failure for r in results
        ]
        assert all(result.attempt and result.attempt.environment["kind"] == "kubernetes" for result in results)
