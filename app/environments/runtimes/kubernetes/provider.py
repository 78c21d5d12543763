"""Creates environments as pods of a Kubernetes cluster."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress

import structlog

from app.environments import prebuilt
from app.environments.contract import EnvironmentProvider, Tags
from app.environments.runtimes.kubernetes.cluster import Cluster, Object, cluster_of
from app.environments.runtimes.kubernetes.environment import KubernetesEnvironment
from app.environments.runtimes.kubernetes.exec_streams import PodStream
from app.environments.runtimes.kubernetes.pod import (
    BRING_HELPER,
    PodInside,
    image_id,
    is_running,
    manifest,
    network_policies,
    refusal,
    waits_for,
)
from app.environments.runtimes.session_environment import ended_on_error
from app.environments.runtimes.setup import EnvironmentRequest, carry_out
from app.environments.tools import Find, tools_of, versions
from app.errors import EngineUnavailable, EnvironmentFailed, ImageUnavailable, NoPlaceToStart, StationError
from app.images.references import built_for_all
from app.models.spec import EnvironmentSpec, Network, Reuse
from app.settings import Settings

log = structlog.get_logger()

_FIRST_LINE_S = 30.0
_FRESH_S = 300.0
_LOOK_S, _LOOK_MOST_S = 0.02, 0.5
"""Seconds between two checks of a starting pod: at first, and at most."""


_users: dict[str, str] = {}
"""User of each image that does not run as root. Kept per process, as each attempt has a provider of its own."""
_policed: set[tuple[Cluster, str]] = set()


class KubernetesProvider(EnvironmentProvider):
    """Makes pods in the namespace of the cluster that is configured here. `tools`: finds the folders of tools."""

    def __init__(self, settings: Settings, *, tools: Find | None = None) -> None:
        self._settings = settings
        self._find = tools

    def prepare_image(self, spec: EnvironmentSpec, *, timeout_s: float) -> str:
        """Returns its reference: the nodes pull it."""
        return image_of(spec, self._settings)

    def tool_versions(self, spec: EnvironmentSpec) -> dict[str, str]:
        return versions(tools_of(spec, self._find))

    def create(self, spec: EnvironmentSpec, tags: Tags, *, timeout_s: float) -> KubernetesEnvironment:
        """Creates an environment. Set-up commands run in each pod: their result cannot be kept."""
        request = EnvironmentRequest(spec, tags, time.monotonic() + timeout_s)
        request.times.phases |= {"image": 0.0, "set_up": 0.0}
        if spec.reuse is Reuse.SHARED_READONLY:
            raise EnvironmentFailed(
                "expected `fresh` or `recycled` for the kind 'kubernetes', found 'shared-readonly': no pods are shared."
            )
        environment = self._started(request)
        with ended_on_error(environment):
            with request.times.measure("set_up"):
                carry_out(spec.setup, environment, request.deadline)
            environment.bring_tools()
            environment.note_begun()
        log.info("environment.created", environment=environment.id, image=spec.label)
        return environment

    def _started(self, request: EnvironmentRequest) -> KubernetesEnvironment:
        """Starts a pod. If its image names another user than root, that is read in it, and a new pod runs as root."""
        image, cluster = image_of(request.spec, self._settings), cluster_of(self._settings)
        self._police(cluster, request.tags.installation)
        while True:
            name = f"mf-{secrets.token_hex(8)}"
            try:
                environment = self._start(cluster, name, image, request)
            except BaseException:
                with suppress(StationError):  # what stays ends itself, or the sweeper removes it
                    cluster.delete_pod(name)
                raise
            if environment is not None:
                return environment
            cluster.delete_pod(name)

    def _start(
        self, cluster: Cluster, name: str, image: str, request: EnvironmentRequest
    ) -> KubernetesEnvironment | None:
        """Starts one pod. None: its user is not root, and is known now."""
        spec, tags, times, user = request.spec, request.tags, request.times, _users.get(image)
        tools = tools_of(spec, self._find)
        with times.measure("create"):
            left_s = tags.deadline_unix_s - time.time()
            cluster.create_pod(manifest(spec, tags, name, image, left_s=left_s, as_root=user is not None))
        with times.measure("start"):
            pod = _await_running(cluster, name, image, request.deadline)
        with times.measure("session"):
            stream, inside = _enter(cluster, name)
            if not inside.is_root:
                stream.close()
                _users[image] = inside.user
                return None
            environment = KubernetesEnvironment(
                *(cluster, name, spec),
                image_id=image_id(pod),
                machine=inside.machine,
                tools=tools,
                times=times,
                fresh=lambda: self._fresh(spec, tags),
            )
            environment.open(stream, user)
        return environment

    def _fresh(self, spec: EnvironmentSpec, tags: Tags) -> KubernetesEnvironment:
        plain = spec.model_copy(update={"setup": (), "tools": (), "network": Network.NONE, "allowed_hosts": ()})
        return self._started(EnvironmentRequest(plain, tags, time.monotonic() + _FRESH_S))

    def _police(self, cluster: Cluster, installation: str) -> None:
        if (cluster, installation) not in _policed:
            for policy in network_policies(installation, self._settings.open_network_allow):
                cluster.ensure_policy(policy)
            _policed.add((cluster, installation))


def image_of(spec: EnvironmentSpec, settings: Settings) -> str:
    """Returns the reference that nodes pull. Raises: ImageUnavailable: it is a recipe, and nodes build nothing."""
    if spec.image is not None:
        return spec.image
    if spec.build is not None and settings.image_mirror is not None:
        return built_for_all(settings.image_mirror, spec.build, settings.base_image)
    raise ImageUnavailable(
        f"expected an image that nodes can pull for {spec.label}, found a recipe: build and push it with `megaflow"
        " images sync`, and name the registry in MEGAFLOW_IMAGE_MIRROR."
    )


def _await_running(cluster: Cluster, name: str, image: str, deadline: float) -> Object:
    """Returns the pod once it runs. Raises: ImageUnavailable, EnvironmentFailed; NoPlaceToStart: no node has room."""
    pause_s, problem, pod = _LOOK_S, "", None
    while True:
        try:
            pod, problem = cluster.pod(name), ""
        except EngineUnavailable as error:
            problem = str(error)
        if pod is None and not problem:
            raise EnvironmentFailed(f"pod {name} was deleted while it started.")
        if pod is not None and is_running(pod):
            return pod
        if pod is not None and (refused := refusal(pod, image)) is not None:
            raise refused
        if time.monotonic() > deadline:
            waits = problem or waits_for(pod or {})
            raise NoPlaceToStart(f"pod {name} did not start in the environment's time: {waits}.")
        time.sleep(pause_s)
        pause_s = min(_LOOK_MOST_S, pause_s * 1.3)


def _enter(cluster: Cluster, name: str) -> tuple[PodStream, PodInside]:
    """Uploads the helper and returns a stream to it; no upload if the user is not root. Raises: EnvironmentFailed."""
    try:
        stream = cluster.exec(name, ("/bin/sh", "-c", BRING_HELPER))
        try:
            inside = PodInside.parse(stream.read_line(_FIRST_LINE_S))
            if inside.is_root:
                program = prebuilt.content("helper", inside.machine)
                stream.write(b"%d\n%b" % (len(program), program))
        except BaseException:
            stream.close()
            raise
    except OSError as error:
        raise EnvironmentFailed(f"the session's helper cannot be brought into pod {name}: {error}") from error
    return stream, inside
