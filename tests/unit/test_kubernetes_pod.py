"""What a pod looks like, what its state means, and when an exec's end is no answer. Without a cluster."""

from __future__ import annotations

import json
import re
import socket
import uuid
from typing import Any

import pytest

from app import errors
from app.environments.contract import Tags
from app.environments.runtimes.kubernetes.changes import changed, judged
from app.environments.runtimes.kubernetes.cluster import refused
from app.environments.runtimes.kubernetes.exec_streams import PodStream, ended_by_itself
from app.environments.runtimes.kubernetes.pod import (
    PodInside,
    image_id,
    is_running,
    manifest,
    network_policies,
    pod_end,
    waits_for,
)
from app.environments.runtimes.kubernetes.pod import refusal as refusal_of
from app.environments.runtimes.kubernetes.provider import image_of
from app.environments.session.connection import ConnectionLost, HelperConnection
from app.environments.session.protocol import FileListing
from app.grading.protected import decide
from app.models.resources import KillAt, Resources
from app.models.spec import Build, Bundle, EnvironmentKind, EnvironmentSpec, Network
from app.settings import Settings

SPEC = EnvironmentSpec(kind=EnvironmentKind.KUBERNETES, image="registry.example/task:1", env={"COST": "$(HOME) $1"})
TAGS = Tags("here", uuid.uuid4(), uuid.uuid4(), uuid.uuid4(), uuid.uuid4(), 1_800_000_000.0)


def made(spec: EnvironmentSpec = SPEC, *, as_root: bool = False) -> dict[str, Any]:
    return manifest(spec, TAGS, "mf-1", spec.image or "", left_s=90.7, as_root=as_root)


def test_a_pod_is_ended_by_the_cluster_and_may_do_little() -> None:
    pod = made()
    spec, (container,) = pod["spec"], pod["spec"]["containers"]
    assert (spec["restartPolicy"], spec["activeDeadlineSeconds"]) == ("Never", 90)
    assert spec["automountServiceAccountToken"] is False
    security = container["securityContext"]
    assert (security["allowPrivilegeEscalation"], security["privileged"]) == (False, False)
    assert "NET_RAW" in security["capabilities"]["drop"]
    assert "runAsUser" not in security
    assert made(as_root=True)["spec"]["containers"][0]["securityContext"]["runAsUser"] == 0
    labels = pod["metadata"]["labels"]
    assert (labels["megaflow"], labels["megaflow.attempt"]) == ("here", str(TAGS.attempt_id))
    assert labels["megaflow.deadline"] == "1800000000"
    assert all(len(value) <= 63 for value in labels.values())
    assert {"name": "COST", "value": "$$(HOME) $$1"} in container["env"]  # the cluster expands no variable of the task


@pytest.mark.parametrize("value", ["$(X)", "$$(X)", "$$$(X)", "$", "$$", "a$", "$1 $$2", "$(", "$$(", "$(A$(B))", "x"])
def test_the_cluster_gives_a_variable_as_the_task_has_it(value: str) -> None:
    (container,) = made(SPEC.model_copy(update={"env": {"V": value}}))["spec"]["containers"]
    (written,) = [one["value"] for one in container["env"] if one["name"] == "V"]
    assert _expanded(written) == value


def _expanded(text: str) -> str:
    """As the kubelet does it (k8s.io/kubernetes/third_party/forked/golang/expansion)."""
    return re.sub(r"\$(?:(\$)|\(([^)]*)\))", lambda found: found[1] or "EXPANDED", text)


def test_the_guaranteed_size_is_requested_and_the_most_is_the_limit() -> None:
    size = Resources(cpus=0.5, memory_bytes=1 << 30, kill_at=KillAt(cpus=2, memory_bytes=3 << 30), disk_bytes=512 << 20)
    found = made(SPEC.model_copy(update={"resources": size}))["spec"]["containers"][0]["resources"]
    assert found["requests"] == {"cpu": "500m", "memory": str(1 << 30), "ephemeral-storage": str(512 << 20)}
    assert found["limits"] == {"cpu": "2000m", "memory": str(3 << 30), "ephemeral-storage": str(512 << 20)}


@pytest.mark.parametrize("network", [Network.NONE, Network.MODEL_ONLY, Network.OPEN])
def test_a_pods_network_policy_is_that_of_its_class(network: Network) -> None:
    labels = made(SPEC.model_copy(update={"network": network}))["metadata"]["labels"].items()
    policies = {one["metadata"]["name"]: one["spec"] for one in network_policies("here", ["10.1.2.3:443"])}
    (name,) = [name for name, spec in policies.items() if spec["podSelector"]["matchLabels"].items() <= labels]
    assert name == ("megaflow-here-open" if network is Network.OPEN else "megaflow-here-closed")
    assert (policies[name]["ingress"], policies[name]["policyTypes"]) == ([], ["Ingress", "Egress"])
    assert policies["megaflow-here-closed"]["egress"] == []
    public, names, allowed = policies["megaflow-here-open"]["egress"]
    assert {"10.0.0.0/8", "169.254.0.0/16"} <= set(public["to"][0]["ipBlock"]["except"])
    assert {one["port"] for one in names["ports"]} == {53}
    assert (allowed["to"][0]["ipBlock"]["cidr"], allowed["ports"][0]["port"]) == ("10.1.2.3/32", 443)


def status(state: dict[str, Any] | None = None, **more: object) -> dict[str, Any]:
    containers = [] if state is None else [{"state": state, "imageID": "docker-pullable://r/t@sha256:ab"}]
    return {"metadata": {"name": "mf-1"}, "status": {**more, "containerStatuses": containers}}


def evicted(message: str) -> dict[str, Any]:
    return status(phase="Failed", reason="Evicted", message=message)


def test_whose_doing_a_pods_end_was() -> None:
    def ended(reason: str) -> dict[str, Any]:
        return status({"terminated": {"exitCode": 137, "reason": reason}}, phase="Failed")

    own = errors.EnvironmentOverLimit
    for pod, kind in (
        (None, errors.EnvironmentVanished),
        (evicted("The node was low on resource: ephemeral-storage."), errors.EnvironmentVanished),
        (evicted("Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. "), own),
        (evicted("Container environment exceeded its local ephemeral storage limit '1Gi'. "), own),
        (ended("OOMKilled"), own),
        (ended("Error"), errors.EnvironmentVanished),
        (status(phase="Failed", reason="DeadlineExceeded", message="too long"), errors.EnvironmentVanished),
        (status({"running": {}}, phase="Running"), None),
    ):
        end = pod_end(pod)
        assert (end and end.kind) is kind, pod


def test_why_a_pod_will_not_run() -> None:
    no_shell = 'exec: "/bin/sh": stat /bin/sh: no such file'
    for state, reason, message, kind in (
        ("waiting", "ContainerCreating", "", type(None)),
        ("waiting", "ImagePullBackOff", "not found", errors.ImageUnavailable),
        ("waiting", "CreateContainerConfigError", "no secret", errors.EnvironmentFailed),
        ("terminated", "StartError", no_shell, errors.ImageUnfit),
        ("terminated", "Error", "", errors.EnvironmentFailed),
    ):
        pod = status({state: {"reason": reason, "message": message}})
        assert type(refusal_of(pod, "an/image:1")) is kind, reason


def test_what_a_pod_that_waits_waits_for() -> None:
    full = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: no cpu"}
    assert waits_for(status(phase="Pending", conditions=[full])) == "Unschedulable: 0/3 nodes: no cpu"
    assert waits_for({}) == "unknown: no reason given"
    assert is_running(status({"running": {}}))
    assert not is_running(status({"waiting": {}}))
    assert PodInside.parse(b"aarch64 1000 node") == PodInside("aarch64", False, "node")
    assert image_id(status({"running": {}})) == "r/t@sha256:ab"


def test_what_a_refusal_of_the_api_server_means() -> None:
    quota = 'pods "mf-1" is forbidden: exceeded quota: tasks, requested: cpu=2'
    for code, message, kind in (
        (403, quota, errors.NoPlaceToStart),
        (403, 'pods is forbidden: User "x" cannot create resource "pods"', errors.EnvironmentFailed),
        (429, "too many requests", errors.EngineUnavailable),
        (503, "", errors.EngineUnavailable),
        (422, "invalid", errors.EnvironmentFailed),
    ):
        assert type(refused("create a pod", code, message)) is kind


def test_an_execs_last_word_tells_an_end_from_a_fault() -> None:
    def said(**status: str) -> bool:
        return ended_by_itself(json.dumps(status).encode())

    assert said(status="Success")
    assert said(status="Failure", reason="NonZeroExitCode")
    assert not said(status="Failure", reason="InternalError", message="stream error")
    assert not ended_by_itself(b"[]")
    assert not ended_by_itself(b"no json")


@pytest.mark.parametrize("cut", [None, "the stream was cut"])
def test_a_stream_that_was_cut_is_no_end_of_a_program(cut: str | None) -> None:
    ours, theirs = socket.socketpair()
    stream = PodStream(ours)
    connection = HelperConnection(stream)
    stream.cut = cut
    theirs.close()
    for use in (lambda: connection.receive(10), lambda: connection.send(b"x")):
        with pytest.raises(ConnectionLost) as lost:
            use()
        assert lost.value.ended is (cut is None)
    connection.close()


def test_a_recipe_is_an_image_of_the_mirror_or_none() -> None:
    recipe = SPEC.model_copy(update={"image": None, "build": Build(context=Bundle(sha256="a" * 64, size_bytes=1))})
    mirrored = Settings(image_mirror="registry.example/megaflow")
    assert image_of(SPEC, mirrored) == SPEC.image
    assert image_of(recipe, mirrored).startswith("registry.example/megaflow/")
    with pytest.raises(errors.ImageUnavailable, match="MEGAFLOW_IMAGE_MIRROR"):
        image_of(recipe, Settings())


def test_what_changed_in_a_pod_is_told_by_the_kernels_times_and_a_fresh_pod() -> None:
    old, new = ("f", 5), ("f", 11)
    image = FileListing(0, {"/bin": ("d", 5), "/bin/sh": old, "/bin/ls": old, "/etc/ld.so.preload": old, "/a": old})
    files = {"/bin": ("d", 11), "/bin/sh": new, "/etc/ld.so.preload": new, "/a": old, "/b": ("d", 11), "/b/moved": old}
    now = FileListing(20, files)
    assert dict(changed(now, image, 10)) == {
        **dict.fromkeys(("/bin/sh", "/etc/ld.so.preload", "/b/moved"), False),
        "/bin/ls": True,  # gone
    }
    assert judged(now, image, 10, decide, lambda path: b"") == (("/etc/ld.so.preload",), ("/bin/sh", "/bin/ls"))
