"""Manifests of pods and network policies, and the meaning of a pod's state. No I/O."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.environments.contract import Tags
from app.environments.isolation.sizes import size_variables
from app.environments.networks import variables
from app.environments.networks.firewall import DROPPED
from app.errors import EnvironmentFailed, EnvironmentOverLimit, EnvironmentVanished, ImageUnavailable, ImageUnfit
from app.host.engine import ROLE
from app.host.privileges import CAP_DROP
from app.models.spec import EnvironmentSpec, Network

CONTAINER = "environment"
CLASS = "megaflow.network"
_HELPER = "/dev/.megaflow-helper"  # /dev is the container's own, in memory: no trace in its layer
_SOCKET = "/dev/.megaflow-socket"
_UPLOAD_S = 120
"""Seconds after which a first process without a helper ends, and the pod with it."""
ORPHAN_EXIT_S = 300
"""Seconds after which a pod without a stream ends itself: longer than a restart of the API server takes."""
_DISK_BYTES = 16 << 30
_DISK_GUARANTEED_BYTES = 1 << 30
_MOST_CPUS = 1 << 16

_WAIT = "sleep 0.05 2>/dev/null || sleep 1"
FIRST_PROCESS = (
    f"i=0; until [ -x {_HELPER} ]; do i=$((i+1)); [ $i -gt {_UPLOAD_S * 20} ] && exit 1; {_WAIT}; done;"
    f" exec {_HELPER} --listen {_SOCKET} --orphan-exit {ORPHAN_EXIT_S}"
)
BRIDGE = (_HELPER, "--bridge", _SOCKET)
BRING_HELPER = (
    'echo "$(uname -m) $(id -u) $(id -un 2>/dev/null || echo "$(id -u):$(id -g)")" && read -r size && umask 077'
    f' && head -c "$size" >{_HELPER}.new && chmod 700 {_HELPER}.new && mv {_HELPER}.new {_HELPER} || exit 1;'
    f" until [ -S {_SOCKET} ]; do {_WAIT}; done; exec {' '.join(BRIDGE)}"
)
"""Prints what it finds (processor, user id, user), reads the helper (its size in a line, its bytes), and becomes
the first connection to it: all over one stream."""


@dataclass(frozen=True, slots=True)
class PodInside:
    """Properties of a pod, as its first stream reports them."""

    machine: str
    is_root: bool
    user: str  # by name, or number and group

    @classmethod
    def parse(cls, line: bytes) -> PodInside:
        """Raises: EnvironmentFailed: that is something else."""
        parts = line.decode("utf-8", "replace").split()
        if len(parts) != 3:
            raise EnvironmentFailed(f"expected the pod's processor and user, found {line[:200]!r}.")
        return cls(parts[0], parts[1] == "0", parts[2])


def manifest(
    spec: EnvironmentSpec, tags: Tags, name: str, image: str, *, left_s: float, as_root: bool
) -> dict[str, Any]:
    """Builds a pod that the cluster ends itself after `left_s`. as_root: the image names another user."""
    no_way = {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["127.0.0.1"]}}  # names fail at once, not after a wait
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {**tags.labels(), ROLE: "environment", CLASS: network_class(spec.network)},
        },
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": max(1, int(left_s)),
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            **({} if spec.network is Network.OPEN else no_way),
            "securityContext": {
                "seccompProfile": {"type": "RuntimeDefault"},
                "sysctls": [{"name": "net.ipv4.ip_unprivileged_port_start", "value": "0"}],
            },
            "containers": [_container(spec, image, as_root=as_root)],
        },
    }


def _container(spec: EnvironmentSpec, image: str, *, as_root: bool) -> dict[str, Any]:
    env = {**size_variables(spec.resources, _MOST_CPUS), **variables(spec), **spec.env}
    return {
        "name": CONTAINER,
        "image": image,
        "command": ["/bin/sh", "-c", FIRST_PROCESS],
        "workingDir": spec.workdir,
        # The cluster reads `$(NAME)` as a variable, and every `$$` as one `$`.
        "env": [{"name": key, "value": value.replace("$", "$$")} for key, value in env.items()],
        "resources": _resources(spec),
        "securityContext": {
            **({"runAsUser": 0, "runAsGroup": 0} if as_root else {}),
            "allowPrivilegeEscalation": False,
            "privileged": False,
            "capabilities": {"drop": CAP_DROP},
        },
    }


def _resources(spec: EnvironmentSpec) -> dict[str, dict[str, str]]:
    """Returns guaranteed and maximum resources. A pod has no process limit: its node has one (`podPidsLimit`)."""
    size, disk = spec.resources, spec.resources.disk_bytes or _DISK_BYTES
    return {
        "requests": {
            "cpu": _cpus(size.cpus),
            "memory": str(size.memory_bytes),
            "ephemeral-storage": str(min(disk, _DISK_GUARANTEED_BYTES)),
        },
        "limits": {
            "cpu": _cpus(size.most.cpus),
            "memory": str(size.most.memory_bytes),
            "ephemeral-storage": str(disk),
        },
    }


def _cpus(count: float) -> str:
    return f"{max(1, round(count * 1000))}m"


def network_class(network: Network) -> str:
    """Returns a pod's class. All policies but `open` have no network: allowed traffic comes over the session."""
    return "open" if network is Network.OPEN else "closed"


def network_policies(installation: str, allow: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields a policy for each class of an installation's pods. allow: private addresses that open ones may reach."""
    public = {"to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": list(DROPPED)}}]}
    names = {
        "to": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}],
        "ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")],
    }
    for name, egress in (("closed", []), ("open", [public, names, *map(_allowed, allow)])):
        labels = {"megaflow": installation, ROLE: "environment"}
        yield {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": f"megaflow-{installation}-{name}", "labels": labels},
            "spec": {
                "podSelector": {"matchLabels": {**labels, CLASS: name}},
                "policyTypes": ["Ingress", "Egress"],
                "ingress": [],
                "egress": egress,
            },
        }


def _allowed(destination: str) -> dict[str, Any]:
    """Builds the rule for ADDRESS[/BITS][:PORT]."""
    network, _, port = destination.partition(":")
    ports = {"ports": [{"protocol": protocol, "port": int(port)} for protocol in ("TCP", "UDP")]} if port else {}
    return {"to": [{"ipBlock": {"cidr": str(ipaddress.ip_network(network, strict=False))}}], **ports}


@dataclass(frozen=True, slots=True)
class PodEnd:
    """End of a pod: the error class for its cause, and a sentence."""

    kind: type[EnvironmentFailed]
    why: str


_OWN_DISK = ("ephemeral local storage usage exceeds", "exceeded its local ephemeral storage limit", "Usage of EmptyDir")
"""Messages of a node that evicts a pod for its own disk use; otherwise the node is short of something."""


def pod_end(pod: Mapping[str, Any] | None) -> PodEnd | None:
    """Returns how the pod ended; None: it has not. pod: from the API server; None: there is no such pod."""
    if pod is None:
        return PodEnd(EnvironmentVanished, "its pod was deleted from outside")
    status = pod.get("status") or {}
    container = _container_state(status)
    ended = container.get("terminated")
    reason, message = status.get("reason") or "", status.get("message") or ""
    if reason == "Evicted" and any(words in message for words in _OWN_DISK):
        return PodEnd(EnvironmentOverLimit, f"it wrote more than its limit of disk: {message}")
    if reason:
        return PodEnd(EnvironmentVanished, f"its pod has ended: {reason}: {message}".rstrip(": "))
    if ended is not None and ended.get("reason") == "OOMKilled":
        return PodEnd(EnvironmentOverLimit, "the memory limit was reached, and its node killed all of it")
    if ended is not None:
        return PodEnd(EnvironmentVanished, f"its container has ended with exit code {ended.get('exitCode')}")
    if pod["metadata"].get("deletionTimestamp"):
        return PodEnd(EnvironmentVanished, "its pod is being deleted from outside")
    if status.get("phase") in ("Failed", "Succeeded"):
        return PodEnd(EnvironmentVanished, f"its pod has ended: {status['phase']}")
    return None


_NO_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
_NO_START = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError")
_NO_SHELL = ("/bin/sh: no such file", '"/bin/sh": stat', "/bin/sh: executable file not found", "exec format error")


def refusal(pod: Mapping[str, Any], image: str) -> EnvironmentFailed | ImageUnavailable | None:
    """Returns why a pod that is not running yet will never run; None: it may."""
    state = _container_state(pod.get("status") or {})
    details = state.get("waiting") or state.get("terminated") or {}
    reason, message = details.get("reason") or "", details.get("message") or ""
    if any(words in message for words in _NO_SHELL):
        return ImageUnfit(
            f"image {image} has no /bin/sh for this node: {message}. Every environment needs a POSIX shell of the"
            " node's architecture."
        )
    if reason in _NO_IMAGE:
        return ImageUnavailable(
            f"image {image} cannot be pulled by its node: {reason}: {message}. Check the reference, and the pull secret"
            " of the namespace's service account `default`."
        )
    if reason in _NO_START:
        return EnvironmentFailed(f"the pod's container cannot be started: {reason}: {message}")
    end = pod_end(pod)
    return None if end is None else EnvironmentFailed(f"the pod ended before it was used: {end.why}")


def is_running(pod: Mapping[str, Any]) -> bool:
    """Whether its container runs, so that an exec can be started."""
    return "running" in _container_state(pod.get("status") or {})


def image_id(pod: Mapping[str, Any]) -> str:
    """Returns the image's digest as its node reports it; empty when it does not."""
    for one in (pod.get("status") or {}).get("containerStatuses") or ():
        return str(one.get("imageID") or "").removeprefix("docker-pullable://")
    return ""


def _container_state(status: Mapping[str, Any]) -> Mapping[str, Any]:
    for one in status.get("containerStatuses") or ():
        state: Mapping[str, Any] = one.get("state") or {}
        return state
    return {}


def waits_for(pod: Mapping[str, Any]) -> str:
    """Returns what a pod that does not run waits for, in the cluster's words."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"{condition.get('reason')}: {condition.get('message')}"
    waiting = _container_state(status).get("waiting") or {}
    return f"{status.get('phase', 'unknown')}: {waiting.get('reason') or 'no reason given'}"
