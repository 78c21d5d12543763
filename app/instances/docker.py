"""The `docker` provider: an instance is a container of a worker image, with its Celery worker inside."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

import docker
import requests
import structlog
from docker.errors import APIError, DockerException, ImageNotFound, NotFound

from app.errors import InstanceFailed
from app.models.instance import InstanceRequest
from app.settings import PREFIX, Settings

log = structlog.get_logger()

_ROLE = "megaflow.role"
_INSTANCE = "megaflow.instance"
_UNREACHABLE = (DockerException, requests.RequestException)

OnExit = Callable[[UUID, int | None, str], None]


class DockerProvider:
    """Each instance is one container that sees the engine's socket, because it makes task containers beside itself.

    Task containers never see that socket. The handle is the container's id.
    """

    name: ClassVar[str] = "docker"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def launch(self, wanted: Sequence[InstanceRequest]) -> dict[UUID, str]:
        with self._client() as client:
            started: dict[UUID, str] = {}
            for request in wanted:
                try:
                    started[request.instance_id] = client.containers.run(**self._container(request)).id
                except ImageNotFound as error:
                    raise InstanceFailed(
                        f"expected the worker image {self._settings.worker_image!r} in the engine, found none;"
                        " try `make worker-image`"
                    ) from error
                except APIError as error:
                    log.warning("instance.not_started", instance_id=str(request.instance_id), error=str(error))
            return started

    def terminate(self, instance_id: UUID, handle: str, *, grace_s: float) -> None:
        with self._client() as client, suppress(NotFound):
            container = client.containers.get(handle)
            if grace_s > 0:
                container.stop(timeout=int(grace_s))
            container.remove(force=True, v=True)

    def alive(self) -> dict[UUID, str]:
        with self._client() as client:
            found = client.containers.list(filters={"label": self._labels()}, ignore_removed=True)
            return {UUID(c.labels[_INSTANCE]): str(c.id) for c in found if _INSTANCE in c.labels}

    def watch(self, on_exit: OnExit, stop: threading.Event) -> None:
        """Report the engine's `die` events until told to stop; comes back when the engine does."""
        while not stop.is_set():
            try:
                with self._client() as client:
                    stream = client.events(decode=True, filters={"event": "die", "label": self._labels()})
                    threading.Thread(target=self._close_at, args=(stop, stream), daemon=True).start()
                    for event in stream:
                        self._died(event, on_exit)
            except (InstanceFailed, *_UNREACHABLE):
                stop.wait(2.0)

    @staticmethod
    def _close_at(stop: threading.Event, stream: Any) -> None:
        stop.wait()
        with closing(stream):
            pass

    @staticmethod
    def _died(event: dict[str, Any], on_exit: OnExit) -> None:
        attributes = event["Actor"]["Attributes"]
        if _INSTANCE in attributes:
            code = int(attributes.get("exitCode", -1))
            on_exit(UUID(attributes[_INSTANCE]), code, f"its container ended with exit code {code}")

    # --- What a worker container is ---------------------------------------------------------------------------------

    def _labels(self) -> list[str]:
        return [f"megaflow={self._settings.installation}", f"{_ROLE}=instance"]

    def _container(self, request: InstanceRequest) -> dict[str, Any]:
        settings = self._settings
        labels = dict(label.split("=", 1) for label in self._labels())
        return {
            "image": settings.worker_image,
            "command": ["python3", "-m", "app.workers.instance", request.model_dump_json()],
            "name": f"megaflow-{settings.installation}-{str(request.instance_id)[-12:]}",
            "labels": {**labels, _INSTANCE: str(request.instance_id)},
            "environment": _environment(),
            "network_mode": settings.worker_network,
            "volumes": self._mounts(),
            "init": True,
            "auto_remove": True,
            "detach": True,
            "pids_limit": 4096,
            "security_opt": ["no-new-privileges"],
        }

    def _mounts(self) -> dict[str, dict[str, str]]:
        """The engine's socket and our home, at the same paths, so that embedded servers and caches are found."""
        mounts = {str(self._settings.home): {"bind": str(self._settings.home), "mode": "rw"}}
        engine = self._engine_socket()
        if engine is not None:
            mounts[engine] = {"bind": engine, "mode": "rw"}
        return mounts

    def _engine_socket(self) -> str | None:
        url = self._url() or "unix:///var/run/docker.sock"
        return url.removeprefix("unix://") if url.startswith("unix://") else None

    def _url(self) -> str | None:
        return self._settings.docker_url or os.environ.get("DOCKER_HOST")

    def _client(self) -> Any:
        try:
            client = docker.DockerClient(base_url=self._url(), timeout=60)
            client.ping()
        except _UNREACHABLE as error:
            raise InstanceFailed(f"expected a container engine, found: {error}; try `megaflow doctor`") from error
        return closing(client)


def _environment() -> dict[str, str]:
    """Our own settings and nothing else of this process's environment, with local files made absolute."""
    found = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    found.setdefault(f"{PREFIX}HOME", str(Path.home() / ".megaflow"))
    found["MF_LAUNCHED_BY"] = socket.gethostname()
    return found
