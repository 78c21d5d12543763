"""Pods that are taken away, streams that are cut, servers that restart: never an answer that the pod did not give."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from app.environments.contract import CommandResult, Environment
from app.environments.runtimes.kubernetes import KubernetesProvider
from app.environments.runtimes.kubernetes.cluster import cluster_of
from app.errors import (
    EngineUnavailable,
    EnvironmentFailed,
    EnvironmentVanished,
    ImageUnavailable,
    ImageUnfit,
    NoPlaceToStart,
)
from app.models.spec import EnvironmentKind, EnvironmentSpec, Reuse
from app.settings import Settings
from megaflow.contract.environments.ground import tags_of
from tests.contract.environment_grounds import built_image
from tests.kubernetes import FakeCluster, Fault
from tests.waiting import eventually

pytestmark = [pytest.mark.docker, pytest.mark.extra]


@pytest.fixture
def cluster(docker_engine: str) -> Iterator[FakeCluster]:
    with FakeCluster() as made:
        yield made


@pytest.fixture
def settings(cluster: FakeCluster, tmp_path: Path) -> Iterator[Settings]:
    here = Settings(home=tmp_path, installation="faults", kubeconfig=cluster.kubeconfig(tmp_path))
    yield here
    cluster_of(here).close()


@pytest.fixture
def provider(settings: Settings) -> KubernetesProvider:
    return KubernetesProvider(settings)


@pytest.fixture
def spec(base_image_tag: str) -> EnvironmentSpec:
    return EnvironmentSpec(kind=EnvironmentKind.KUBERNETES, image=base_image_tag)


@pytest.fixture
def pod(provider: KubernetesProvider, spec: EnvironmentSpec) -> Environment:
    return provider.create(spec, tags_of("faults"), timeout_s=60)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


def under_way(threads: ThreadPoolExecutor, pod: Environment) -> Future[CommandResult]:
    """A long command that has begun."""
    running = threads.submit(pod.run, "touch /begun; sleep 30; echo done", timeout_s=60)
    eventually(lambda: pod.run("test -e /begun", timeout_s=10).ok)
    return running


def names(cluster: FakeCluster) -> list[str]:
    return [one["metadata"]["name"] for one in cluster.objects("pods")]


def test_a_pod_that_is_evicted_under_a_command_is_infrastructures_fault(
    cluster: FakeCluster, pod: Environment, threads: ThreadPoolExecutor
) -> None:
    running = under_way(threads, pod)
    cluster.evict(pod.id)
    with pytest.raises(EnvironmentVanished, match=r"Evicted: The node was low"):
        running.result(timeout=20)
    pod.destroy()


def test_a_pod_that_is_deleted_under_a_command_is_infrastructures_fault(
    cluster: FakeCluster, provider: KubernetesProvider, pod: Environment, threads: ThreadPoolExecutor
) -> None:
    running = under_way(threads, pod)
    assert provider.sweep(installation="faults") == [pod.id]
    with pytest.raises(EnvironmentVanished, match=r"somebody else|exit code"):
        running.result(timeout=20)
    pod.destroy()
    eventually(lambda: names(cluster) == [])


def test_a_stream_that_is_cut_gives_no_answer_and_the_next_command_has_a_new_one(
    cluster: FakeCluster, pod: Environment, threads: ThreadPoolExecutor
) -> None:
    running = under_way(threads, pod)
    shell = pod.shell()
    assert shell.run("true", timeout_s=10).ok
    cluster.stop()
    with pytest.raises(EnvironmentFailed, match="was cut"):
        running.result(timeout=20)
    with pytest.raises(EnvironmentFailed):
        pod.run("true", timeout_s=10)
    cluster.start()
    with pytest.raises(EnvironmentFailed):
        shell.run("true", timeout_s=10)
    shell.close()
    left = pod.run("sleep 1; cat /proc/[0-9]*/cmdline | tr '\\0' ' '", timeout_s=20).stdout
    assert b"sleep 30" not in left  # what was cut off does not run on
    assert pod.get("/begun") == b""
    pod.destroy()


def test_an_idle_environment_outlives_a_restart_of_the_server(cluster: FakeCluster, pod: Environment) -> None:
    pod.put("/kept", b"before")
    cluster.stop()
    time.sleep(0.5)
    cluster.start()
    assert pod.run("cat /kept", timeout_s=20).stdout == b"before"
    pod.destroy()


def test_a_server_that_restarts_while_a_pod_starts_costs_time_alone(
    cluster: FakeCluster, provider: KubernetesProvider, spec: EnvironmentSpec
) -> None:
    cluster.faults.append(Fault("GET", "pods", 503, "ServiceUnavailable", "restarting", times=3))
    pod = provider.create(spec, tags_of("faults"), timeout_s=60)
    assert pod.run("true", timeout_s=10).ok
    pod.destroy()


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault("POST", "pods", 403, "Forbidden", "exceeded quota: tasks, limited: cpu=4"), NoPlaceToStart),
        (Fault("POST", "pods", 429, "TooManyRequests", "slow down"), EngineUnavailable),
        (Fault("POST", "pods", after=True), EngineUnavailable),  # it was made, and the answer was lost
    ],
)
def test_a_refusal_or_a_lost_answer_leaves_no_pod(
    cluster: FakeCluster, provider: KubernetesProvider, spec: EnvironmentSpec, fault: Fault, kind: type[Exception]
) -> None:
    cluster.faults.append(fault)
    with pytest.raises(kind):
        provider.create(spec, tags_of("faults"), timeout_s=60)
    eventually(lambda: names(cluster) == [])
    provider.create(spec, tags_of("faults"), timeout_s=60).destroy()


def test_a_pod_ends_at_its_deadline_without_us(provider: KubernetesProvider, spec: EnvironmentSpec) -> None:
    tags = dataclasses.replace(tags_of("faults"), deadline_unix_s=time.time() + 4)
    pod = provider.create(spec, tags, timeout_s=60)
    with pytest.raises(EnvironmentVanished, match="DeadlineExceeded"):
        pod.run("sleep 30", timeout_s=60)
    pod.destroy()


def test_commands_run_as_the_images_user_and_files_are_ours_to_write(
    provider: KubernetesProvider, spec: EnvironmentSpec
) -> None:
    made = "useradd --create-home worker && mkdir -p /testbed && chown worker /testbed"
    recipe = f"FROM {spec.image}\nRUN {made}\nUSER worker\n"
    with built_image(recipe) as image:
        for _ in range(2):  # the second time it is known
            pod = provider.create(spec.model_copy(update={"image": image}), tags_of("faults"), timeout_s=60)
            assert pod.run("id -un; touch mine && ! touch /etc/not-mine", timeout_s=20).stdout == b"worker\n"
            pod.put("/etc/by-us", b"x")
            pod.destroy()


def test_an_image_that_cannot_be_had_or_has_no_shell_is_told(
    cluster: FakeCluster, provider: KubernetesProvider, spec: EnvironmentSpec
) -> None:
    absent = spec.model_copy(update={"image": "megaflow-test/no-such-image:1"})
    with pytest.raises(ImageUnavailable, match="ErrImagePull"):
        provider.create(absent, tags_of("faults"), timeout_s=60)
    with (
        built_image("FROM scratch\nLABEL empty=yes\nWORKDIR /x\n") as image,
        pytest.raises(ImageUnfit, match="/bin/sh"),
    ):
        provider.create(spec.model_copy(update={"image": image}), tags_of("faults"), timeout_s=60)
    shared = spec.model_copy(update={"reuse": Reuse.SHARED_READONLY})
    with pytest.raises(EnvironmentFailed, match="shared-readonly"):
        provider.create(shared, tags_of("faults"), timeout_s=60)
    eventually(lambda: names(cluster) == [])
