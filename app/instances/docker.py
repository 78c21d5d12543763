"""The `docker` provider: an instance is a container of the worker image, with its Celery worker inside.

The instance has the engine's socket, because it makes task containers next to itself; task containers never have it.
Of this host it has only what a worker needs: the embedded servers' sockets, artifacts, caches, logs. When the launcher
itself runs in a container, its instances have the same volumes.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit
from uuid import UUID

import docker
import structlog
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from requests import RequestException
from urllib3.exceptions import HTTPError

from app.errors import InstanceFailed
from app.host.archives import of_file
from app.instances.base import OnExit
from app.instances.environment import CERTIFICATES, exports, passed_on
from app.models.instance import InstanceRequest
from app.settings import PREFIX, Settings

log = structlog.get_logger()

_ROLE = "megaflow.role"
_INSTANCE = "megaflow.instance"
_UNREACHABLE = (DockerException, RequestException, HTTPError, OSError)
_DEFAULT_ENGINE = "unix:///var/run/docker.sock"
_ENDED = ["exited", "dead"]
_STANDING = ["created", "running", "paused", "restarting"]
_AT_ONCE = 8
_AGAIN_S = 1.0
_LOGS_KEPT = 1000

_ENVIRONMENT = "/opt/megaflow/environment"
"""File that the image's entrypoint (worker_images/worker/bin) reads, then deletes."""
_LOG = "MF_INSTANCE_LOG"


class DockerInstances:
    """The handle is the container's id. Safe to share among threads."""

    name: ClassVar[str] = "docker"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def launch(self, requests: Sequence[InstanceRequest]) -> dict[UUID, str]:
        with self._client() as client, ThreadPoolExecutor(_AT_ONCE) as threads:
            image = self._image(client)
            sight = self._sight(client)
            self._prune_logs()
            handles = threads.map(lambda request: self._start(client, request, image, sight), requests)
            started = zip(requests, handles, strict=True)
            return {request.instance_id: handle for request, handle in started if handle is not None}

    def terminate(self, instance_id: UUID, handle: str, *, grace_s: float) -> None:
        with self._client() as client, suppress(NotFound):
            container = client.containers.get(handle)
            if grace_s > 0:
                container.stop(timeout=int(grace_s))
            _remove(container)

    def alive(self) -> dict[UUID, str]:
        with self._client() as client:
            return {UUID(c.labels[_INSTANCE]): str(c.id) for c in self._containers(client, _STANDING)}

    def watch(self, on_exit: OnExit, stop: threading.Event) -> None:
        """Reports ends as the engine sends them, at first the earlier ones; an end may be reported twice."""
        while not stop.is_set():
            try:
                with self._client() as client, self._deaths(client, stop) as deaths:
                    self._catch_up(client, on_exit)
                    for event in deaths:
                        self._died(event, on_exit)
            except (InstanceFailed, *_UNREACHABLE) as error:
                log.debug("instance.engine_silent", error=str(error))
            stop.wait(_AGAIN_S)

    @contextmanager
    def _deaths(self, client: Any, stop: threading.Event) -> Iterator[Any]:
        stream = client.events(decode=True, filters={"event": "die", "label": self._labels()})
        left = threading.Event()

        def close_on_stop() -> None:
            while not left.wait(0.2):
                if stop.is_set():
                    stream.close()
                    return

        closer = threading.Thread(target=close_on_stop, name="docker-events-closer", daemon=True)
        closer.start()
        try:
            yield stream
        finally:
            left.set()
            closer.join()
            stream.close()

    def _catch_up(self, client: Any, on_exit: OnExit) -> None:
        for container in self._containers(client, _ENDED):
            code = int(container.attrs["State"]["ExitCode"])
            on_exit(UUID(container.labels[_INSTANCE]), code, _ended_with(code))
            _remove(container)

    @staticmethod
    def _died(event: Mapping[str, Any], on_exit: OnExit) -> None:
        attributes = event["Actor"]["Attributes"]
        if _INSTANCE in attributes:
            code = int(attributes.get("exitCode", -1))
            on_exit(UUID(attributes[_INSTANCE]), code, _ended_with(code))

    def _start(self, client: Any, request: InstanceRequest, image: str, sight: Mapping[str, Any]) -> str | None:
        container = None
        try:
            options = self._container(request, image)
            if (existing := self._existing(client, options["name"])) is not None:
                return existing
            container = client.containers.create(**options, **sight)
            container.put_archive("/", of_file(_ENVIRONMENT, exports(self._environment(request)), mode=0o600))
            container.start()
        except (APIError, RequestException) as error:
            log.warning("instance.not_started", instance_id=str(request.instance_id), error=str(error))
            if container is not None:
                _remove(container)
            return None
        return str(container.id)

    @staticmethod
    def _existing(client: Any, name: str) -> str | None:
        """Returns the container's id if an earlier request made it. Removes a container without its files."""
        with suppress(NotFound):
            container = client.containers.get(name)
            if container.status != "created":
                return str(container.id)
            _remove(container)
        return None

    def _container(self, request: InstanceRequest, image: str) -> dict[str, Any]:
        labels = dict(label.split("=", 1) for label in self._labels())
        # A time of 0 would mean no limit.
        bound = (
            [] if request.lifetime_s is None else ["timeout", "--kill-after=30", f"{max(1.0, request.lifetime_s):.3f}"]
        )
        return {
            "image": image,
            "command": [*bound, "python", "-m", "app.workers.instance", request.model_dump_json()],
            "name": f"megaflow-{self._settings.installation}-{str(request.instance_id)[-12:]}",
            "labels": {**labels, _INSTANCE: str(request.instance_id), "megaflow.mode": request.mode.value},
            "network_mode": self._settings.worker_network,
            "init": True,
            "auto_remove": True,
            "pids_limit": 4096,
            "security_opt": ["no-new-privileges"],
        }

    def _labels(self) -> list[str]:
        return [f"megaflow={self._settings.installation}", f"{_ROLE}=instance"]

    def _containers(self, client: Any, states: list[str]) -> list[Any]:
        filters = {"label": self._labels(), "status": states}
        containers = client.containers.list(all=True, filters=filters, ignore_removed=True)
        return [container for container in containers if _INSTANCE in container.labels]

    def _image(self, client: Any) -> str:
        try:
            return str(client.images.get(self._settings.worker_image).id)
        except ImageNotFound as error:
            raise InstanceFailed(
                f"expected the worker image {self._settings.worker_image!r} in the engine, found none;"
                " try `make worker-image`"
            ) from error

    def _sight(self, client: Any) -> dict[str, Any]:
        ours = _own_container()
        if ours is not None:
            with suppress(NotFound):
                return {"volumes_from": [client.containers.get(ours).id]}
        return {"volumes": [f"{path.resolve()}:{path}:{mode}" for path, mode in self._shared()]}

    def _shared(self) -> Iterator[tuple[Path, str]]:
        """Yields paths of this host that are the same in the instance. Links become real folders there."""
        settings = self._settings
        folders = [settings.home / name for name in ("cache", "logs", "run/slots", "tools")]
        artifacts = urlsplit(settings.artifacts())
        if artifacts.scheme == "file":
            folders.append(Path(unquote(artifacts.path)))
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        if settings.embeds_postgres:
            folders.append(settings.postgres_socket_dir)
        if settings.embeds_redis:
            folders.append(settings.redis_socket.parent)
        yield from ((folder, "rw") for folder in folders)
        yield from ((folder, "ro") for folder in self._agents())
        yield from ((file, "ro") for file in {Path(os.environ[name]) for name in CERTIFICATES if _names_file(name)})
        if (engine := self._engine()).startswith("unix://"):
            yield Path(engine.removeprefix("unix://")), "rw"

    def _agents(self) -> set[Path]:
        """Returns the folders of agents that are not part of MegaFlow."""
        folders = {manifest.parent for manifest in self._settings.agent_manifests}
        return {folder for folder in folders if folder.is_absolute() and folder.is_dir()}

    def _environment(self, request: InstanceRequest) -> dict[str, str]:
        """Returns settings, credentials and proxies; no other variable of this process, no model's key."""
        variables = passed_on() | {name: os.environ[name] for name in CERTIFICATES if _names_file(name)}
        log_file = self._logs() / f"{request.instance_id}.log"
        return variables | self._settings.variables() | {f"{PREFIX}DOCKER_URL": self._engine(), _LOG: str(log_file)}

    def _logs(self) -> Path:
        return self._settings.home / "logs" / "instances"

    def _prune_logs(self) -> None:
        old = sorted(self._logs().glob("*.log"))[:-_LOGS_KEPT]  # ids sort by time
        for file in old:
            file.unlink(missing_ok=True)

    def _engine(self) -> str:
        return self._settings.docker_url or os.environ.get("DOCKER_HOST") or _DEFAULT_ENGINE

    def _client(self) -> Any:
        try:
            client = docker.DockerClient(base_url=self._engine(), timeout=60, max_pool_size=_AT_ONCE)
            client.ping()
        except _UNREACHABLE as error:
            raise InstanceFailed(f"expected a container engine, found: {error}; try `megaflow doctor`") from error
        return closing(client)


def _own_container() -> str | None:
    with suppress(OSError):
        match = re.search(r"/containers/([0-9a-f]{64})/hostname ", Path("/proc/self/mountinfo").read_text())
        return match[1] if match else None
    return None


def _names_file(variable: str) -> bool:
    return os.path.isfile(os.environ.get(variable, ""))


def _remove(container: Any) -> None:
    """Removes a container. No error when it is gone, or going: the engine removes it by itself, too."""
    try:
        container.remove(force=True, v=True)
    except APIError as error:
        if error.status_code not in (404, 409):
            raise


def _ended_with(code: int) -> str:
    return f"its container ended with exit code {code}"
