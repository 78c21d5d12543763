"""Lists the objects of this installation, from the engine and this host's disk."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from app.environments.runtimes.local.processes import OWNER, owner_of
from app.environments.runtimes.oci import Records
from app.errors import EngineUnavailable, EnvironmentFailed
from app.host.engine import ROLE, Engine, engine_of
from app.ledger.receipt_check import ListedResource
from app.ledger.receipts import ObjectKind
from app.settings import Settings


def listed(settings: Settings) -> tuple[list[ListedResource], list[str]]:
    """Returns containers, networks, volumes, pods, folders and environments with our label, and which of `engine` and
    `kubernetes` did not answer.
    """
    objects, silent = [*_folders(settings), *_engineless(settings)], []
    try:
        engine = engine_of(settings)
        with engine.named("list what is ours", EnvironmentFailed):
            objects += [*_containers(engine, settings), *_networks(engine, settings), *_volumes(engine)]
    except (EngineUnavailable, EnvironmentFailed):
        silent.append("engine")
    try:
        objects += [
            _listed(ObjectKind.POD, name_of(pod), name_of(pod), pod["metadata"]["labels"], made_of(pod))
            for pod in pods_of(settings)
        ]
    except (EngineUnavailable, EnvironmentFailed):
        silent.append("kubernetes")
    return objects, silent


def pods_of(settings: Settings) -> list[dict[str, Any]]:
    """Returns the environments in the cluster. Raises: EngineUnavailable: none is configured; EnvironmentFailed."""
    if not settings.in_cluster:
        raise EngineUnavailable("no cluster is configured")
    try:
        from app.environments.runtimes.kubernetes.cluster import cluster_of, environments_of
    except ImportError as error:
        raise EngineUnavailable(f"the extra `kubernetes` is not installed: {error}") from error
    return environments_of(cluster_of(settings), settings.installation)


def name_of(pod: dict[str, Any]) -> str:
    """Returns a pod's name."""
    return str(pod["metadata"]["name"])


def ended_at(pod: dict[str, Any]) -> float:
    """Returns when its container ended (Unix time). Infinite: it has not, or its node does not report it."""
    for one in pod.get("status", {}).get("containerStatuses") or ():
        if (ended := one["state"].get("terminated")) is not None and ended.get("finishedAt"):
            return unix_of(ended["finishedAt"])
    return math.inf


def made_of(pod: dict[str, Any]) -> float:
    """Returns when it was made (Unix time), according to the API server."""
    return unix_of(pod["metadata"]["creationTimestamp"])


def volumes_of(settings: Settings, container_id: str) -> list[str]:
    """Returns a container's volumes that its image asks for. Raises: EngineUnavailable, EnvironmentFailed."""
    engine = engine_of(settings)
    with engine.named(f"look at {container_id[:12]}", EnvironmentFailed):
        mounts = engine.api.inspect_container(container_id)["Mounts"]
    return [mount["Name"] for mount in mounts if mount["Type"] == "volume"]


def networks_since(settings: Settings, since: float) -> list[str]:
    """Returns our networks that were made after `since` (Unix time). Raises: EngineUnavailable, EnvironmentFailed."""
    engine = engine_of(settings)
    with engine.named("list networks", EnvironmentFailed):
        return [network.id for network in _networks(engine, settings) if time.time() - network.age_s >= since]


def _containers(engine: Engine, settings: Settings) -> Iterator[ListedResource]:
    for container in engine.api.containers(all=True, filters=_ours(settings)):
        name = container["Names"][0].lstrip("/") if container["Names"] else container["Id"][:12]
        yield _listed(ObjectKind.CONTAINER, container["Id"], name, container["Labels"], float(container["Created"]))


def _networks(engine: Engine, settings: Settings) -> Iterator[ListedResource]:
    for entry in engine.api.networks(filters=_ours(settings)):
        yield _listed(ObjectKind.NETWORK, entry["Id"], entry["Name"], entry["Labels"], unix_of(entry["Created"]))


def _volumes(engine: Engine) -> Iterator[ListedResource]:
    """Yields all volumes of the engine: those that a container's image asks for have no label, only a name."""
    for volume in engine.api.volumes()["Volumes"] or ():
        yield _listed(ObjectKind.VOLUME, volume["Name"], volume["Name"], volume["Labels"] or {}, _made_at(volume))


def _made_at(volume: Mapping[str, Any]) -> float:
    return unix_of(volume["CreatedAt"]) if volume.get("CreatedAt") else time.time()


def _folders(settings: Settings) -> Iterator[ListedResource]:
    for file in (settings.home / "local").glob(f"*/{OWNER}"):
        labels = owner_of(file.parent).get("labels", {})
        if labels.get("megaflow") == settings.installation:
            yield _listed(ObjectKind.FOLDER, file.parent.name, str(file.parent), labels, _made(file))


def _engineless(settings: Settings) -> Iterator[ListedResource]:
    for record in Records(settings.home.resolve()).all():
        if record.installation == settings.installation:
            yield _listed(ObjectKind.ENVIRONMENT, record.id, record.image, record.labels, record.made_unix_s)


def _made(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return time.time()


def _ours(settings: Settings) -> dict[str, str]:
    return {"label": f"megaflow={settings.installation}"}


def _listed(kind: ObjectKind, identity: str, name: str, labels: Mapping[str, str], made: float) -> ListedResource:
    run, attempt, instance = (label_id(labels, part) for part in ("run", "attempt", "instance"))
    role = labels.get(ROLE, "" if kind.engines else "environment")
    return ListedResource(kind, identity, name, role, run, attempt, instance, max(0.0, time.time() - made))


def label_id(labels: Mapping[str, Any], part: str) -> UUID | None:
    """Returns the id in the label `megaflow.<part>`; None when it holds none."""
    try:
        return UUID(labels[f"megaflow.{part}"])
    except (KeyError, ValueError):
        return None


def unix_of(stamp: str) -> float:
    """Converts a time as the engine or the cluster writes it to seconds."""
    return datetime.fromisoformat(stamp).timestamp()
