"""Pods that are taken away, streams that are cut, servers that restart: never an answer that the pod did not give."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app import errors
from app.environments.contract import CommandResult
from app.environments.runtimes.kubernetes.environment import KubernetesEnvironment
from app.environments.runtimes.kubernetes.provider import KubernetesProvider
from app.environments.sweeper import Sweeper
from app.models.spec import EnvironmentKind, EnvironmentSpec, Reuse
from app.settings import Settings
from megaflow.contract.environments.fixture import tags_of
from tests.contract.environment_fixtures import built_image
from tests.kubernetes import FakeCluster, Fault
from tests.waiting import eventually

pytestmark = [pytest.mark.docker, pytest.mark.extra]

Create = Callable[..., KubernetesEnvironment]
TAGS = tags_of("faults")


@pytest.fixture
def cluster(docker_engine: str) -> Iterator[FakeCluster]:
    with FakeCluster() as made:
        yield made


@pytest.fixture
def settings(cluster: FakeCluster, tmp_path: Path) -> Iterator[Settings]:
    file = cluster.kubeconfig(tmp_path)
    here = Settings(home=tmp_path, installation="faults", kubeconfig=file, kubernetes_environments="default")
    yield here
    eventually(lambda: not cluster.objects("pods"), "no pod to be left")


@pytest.fixture
def create(settings: Settings, base_image_tag: str) -> Create:
    """A pod, with some of its spec and its deadline (in seconds) changed."""
    provider = KubernetesProvider(settings)

    def made(lives_s: float = 600.0, **changes: Any) -> KubernetesEnvironment:
        tags = dataclasses.replace(TAGS, deadline_unix_s=time.time() + lives_s)
        spec = EnvironmentSpec(**{"kind": EnvironmentKind.KUBERNETES, "image": base_image_tag, **changes})
        return provider.create(spec, tags, timeout_s=60)

    return made


def under_way(pod: KubernetesEnvironment) -> Future[CommandResult]:
    """A long command that has begun."""
    running = ThreadPoolExecutor(1).submit(pod.run, "touch /begun; sleep 30; echo done", timeout_s=60)
    eventually(lambda: pod.run("test -e /begun", timeout_s=10).ok)
    return running


def test_a_pod_that_goes_under_a_command_is_infrastructures_fault(
    cluster: FakeCluster, settings: Settings, create: Create
) -> None:
    evicted, swept, late = create(), create(), create(lives_s=6)
    running = [under_way(pod) for pod in (evicted, swept, late)]
    cluster.evict(evicted.id)
    Sweeper(settings).sweep({TAGS.instance_id})  # its own
    assert swept.run("true", timeout_s=10).ok
    with pytest.raises(errors.EnvironmentVanished, match=r"Evicted: The node was low"):
        running[0].result(timeout=20)
    with pytest.raises(errors.EnvironmentVanished, match="DeadlineExceeded"):
        running[2].result(timeout=20)
    assert Sweeper(settings).sweep(set(), ended={TAGS.instance_id}).removed == 3
    with pytest.raises(errors.EnvironmentVanished, match=r"deleted from outside|exit code"):
        running[1].result(timeout=20)


def test_a_stream_that_is_cut_gives_no_answer_and_the_next_command_has_a_new_one(
    cluster: FakeCluster, create: Create
) -> None:
    pod = create()
    running, shell = under_way(pod), pod.shell()
    assert shell.run("true", timeout_s=10).ok
    cluster.stop()
    with pytest.raises(errors.EnvironmentFailed, match="was cut"):
        running.result(timeout=20)
    with pytest.raises(errors.EnvironmentFailed):
        pod.run("true", timeout_s=10)
    cluster.start()
    with pytest.raises(errors.EnvironmentFailed):
        shell.run("true", timeout_s=10)
    shell.close()
    left = pod.run("sleep 1; cat /proc/[0-9]*/cmdline | tr '\\0' ' '", timeout_s=20).stdout
    assert b"sleep 30" not in left  # what was cut off does not run on
    assert pod.get("/begun") == b""
    pod.destroy()


def test_a_restart_of_the_server_costs_time_alone(cluster: FakeCluster, create: Create) -> None:
    cluster.faults.append(Fault("GET", "pods", 503, "ServiceUnavailable", "restarting", times=3))
    pod = create()
    pod.put("/kept", b"before")
    cluster.stop()
    time.sleep(0.5)
    cluster.start()
    assert pod.run("cat /kept", timeout_s=20).stdout == b"before"
    pod.destroy()


def test_a_refusal_or_a_lost_answer_leaves_no_pod(cluster: FakeCluster, create: Create) -> None:
    quota = Fault("POST", "pods", 403, "Forbidden", "exceeded quota: tasks, limited: cpu=4")
    busy, lost = Fault("POST", "pods", 429, "TooManyRequests", "slow down"), Fault("POST", "pods", after=True)
    for fault, kind in (
        (quota, errors.NoPlaceToStart),
        (busy, errors.EngineUnavailable),
        (lost, errors.EngineUnavailable),  # it was made
    ):
        cluster.faults.append(fault)
        with pytest.raises(kind):
            create()
        eventually(lambda: not cluster.objects("pods"))


def test_commands_run_as_the_images_user_and_files_are_ours_to_write(create: Create, base_image_tag: str) -> None:
    made = "useradd --create-home worker && mkdir -p /testbed && chown worker /testbed"
    with built_image(f"FROM {base_image_tag}\nRUN {made}\nUSER worker\n") as image:
        for _ in range(2):  # the second time it is known
            pod = create(image=image)
            assert pod.run("id -un; touch mine && ! touch /etc/not-mine", timeout_s=20).stdout == b"worker\n"
            pod.put("/etc/by-us", b"x")
            pod.destroy()


def test_an_image_that_cannot_be_had_or_has_no_shell_is_told(create: Create) -> None:
    with pytest.raises(errors.ImageUnavailable, match="ErrImagePull"):
        create(image="megaflow-test/no-such-image:1")
    with built_image("FROM scratch\nWORKDIR /x\n") as image, pytest.raises(errors.ImageUnfit, match="/bin/sh"):
        create(image=image)
    with pytest.raises(errors.EnvironmentFailed, match="shared-readonly"):
        create(reuse=Reuse.SHARED_READONLY)
