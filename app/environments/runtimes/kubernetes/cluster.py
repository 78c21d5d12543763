"""Client of one cluster's API server: calls with timeouts, errors in our classes, execs as streams."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx2
from lightkube.config.client_adapter import Client, ConnectionParams
from lightkube.config.kubeconfig import SingleConfig

from app.environments.runtimes.kubernetes.exec_streams import PodStream, PodStreams
from app.errors import EngineUnavailable, EnvironmentFailed, NoPlaceToStart, SettingsInvalid
from app.host.engine import ROLE
from app.kubernetes import configuration
from app.settings import Settings

_CALL_S = 20.0
_TRY = "see docs/howto/kubernetes.md"
_ABSENT = 404
_TAKEN = 409
_BUSY = (429, 500, 502, 503, 504)

Object = dict[str, Any]


class Cluster:
    """Namespace in which environments are made. Safe to share between threads."""

    def __init__(self, config: SingleConfig, namespace: str | None = None) -> None:
        """namespace: None: the configuration's."""
        self.namespace = namespace or config.namespace
        self.url = str(config.cluster.server)
        self._calls = Client(config, ConnectionParams(timeout=httpx2.Timeout(_CALL_S)))
        self._execs = PodStreams(config)

    def create_pod(self, manifest: Object) -> None:
        """Raises: NoPlaceToStart: a quota is used up; EnvironmentFailed; EngineUnavailable: it may have been made."""
        self._answer("POST", self._path("pods"), "create a pod", json=manifest)

    def pod(self, name: str) -> Object | None:
        """Returns its current state; None: there is none. Raises: EnvironmentFailed, EngineUnavailable."""
        return self._answer("GET", self._path("pods", name), "look at a pod", absent=True)

    def pods(self, selector: str) -> list[Object]:
        """Lists pods with these labels. Raises: EnvironmentFailed, EngineUnavailable."""
        answer = self._answer("GET", self._path("pods"), "list pods", params={"labelSelector": selector})
        return list(answer["items"]) if answer is not None else []

    def delete_pod(self, name: str) -> None:
        """Deletes a pod; its node ends it in a second. Missing: fine. Raises: EnvironmentFailed, EngineUnavailable."""
        self._answer("DELETE", self._path("pods", name), "delete a pod", absent=True)

    def exec(self, pod: str, argv: tuple[str, ...]) -> PodStream:
        """Opens an exec, see `PodStreams.open`."""
        return self._execs.open(self.namespace, pod, argv)

    def ensure_policy(self, manifest: Object) -> None:
        """Creates or replaces the policy. Raises: EnvironmentFailed, EngineUnavailable."""
        name, base = manifest["metadata"]["name"], "apis/networking.k8s.io/v1"
        doing = f"create the network policy {name}"
        if self._answer("POST", self._path("networkpolicies", base=base), doing, json=manifest, taken=True) is None:
            path = self._path("networkpolicies", name, base=base)
            self._answer("PUT", path, doing, json=manifest)

    def _path(self, plural: str, name: str = "", *, base: str = "api/v1") -> str:
        return f"{base}/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")

    def _answer(
        self, method: str, path: str, doing: str, *, absent: bool = False, taken: bool = False, **given: Any
    ) -> Object | None:
        """Returns the answer. None: with `absent`, nothing of that name exists; with `taken`, something does."""
        try:
            answer = self._calls.request(method, path, **given)
        except httpx2.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise EngineUnavailable(
                f"{doing}: the API server at {self.url} does not answer: {reason}; {_TRY}."
            ) from error
        if (absent and answer.status_code == _ABSENT) or (taken and answer.status_code == _TAKEN):
            return None
        if answer.is_success:
            body: Object = answer.json()
            return body
        raise refused(doing, answer.status_code, _message(answer))


def refused(doing: str, code: int, message: str) -> EnvironmentFailed | EngineUnavailable:
    """Returns the error for a refused call."""
    if "exceeded quota" in message:
        return NoPlaceToStart(f"{doing}: the namespace's quota is used up: {message}")
    if code in _BUSY:
        return EngineUnavailable(f"{doing}: the API server is busy or broken ({code}): {message}")
    return EnvironmentFailed(f"{doing}: the API server refuses ({code}): {message}")


def _message(answer: httpx2.Response) -> str:
    try:
        return str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:500]


def cluster_of(settings: Settings) -> Cluster:
    """Returns the cluster of these settings, one per process. Raises: EngineUnavailable: there is none."""
    if not settings.in_cluster:
        raise EngineUnavailable(
            "expected a namespace for environments of the kind 'kubernetes', found none: set"
            f" MEGAFLOW_KUBERNETES_ENVIRONMENTS on every host; {_TRY}."
        )
    return _cluster(settings.kubeconfig, settings.kubernetes_environments, os.environ.get("KUBECONFIG"))


@lru_cache(maxsize=8)
def _cluster(file: Path | None, namespace: str | None, named: str | None) -> Cluster:
    """Returns the cluster. named: the environment's KUBECONFIG, which counts where no file is given."""
    try:
        return Cluster(configuration(Settings(kubeconfig=file)), namespace)
    except SettingsInvalid as error:
        raise EngineUnavailable(f"{error}; {_TRY}.") from error


def environments_of(cluster: Cluster, installation: str) -> list[Object]:
    """Lists an installation's pods, except deleted ones. Raises: EnvironmentFailed, EngineUnavailable."""
    pods = cluster.pods(f"megaflow={installation},{ROLE}=environment")
    return [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]
