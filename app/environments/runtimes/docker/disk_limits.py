"""Limits how much a container writes: by the engine's quota where there is one, else by watching."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import structlog
from docker.errors import NotFound
from docker.types import Ulimit

from app.environments.runtimes.compose.resources import BESIDE, PROJECT
from app.environments.runtimes.docker.container import DockerEnvironment
from app.errors import EnvironmentFailed, StationError
from app.host.container_layer import usage_of
from app.host.disk import DiskUsage
from app.host.disk_watch import DiskWatch, limit_of
from app.host.engine import ROLE, Engine
from app.models.spec import EnvironmentSpec, Reuse
from app.settings import Settings

log = structlog.get_logger()

_MOUNTS = Path("/proc/self/mountinfo")
_SUBVOLUMES = ("btrfs", "zfs")
"""Storage drivers that have a quota for every layer."""
_OPEN_FILES = 1 << 20
_FEW_FILES = 1 << 14
"""Minimum of open files: a lower limit of the worker is not applied to a container."""
_WRITABLE = {
    "/tmp": "rw,exec,nosuid,nodev,mode=1777",
    "/var/tmp": "rw,exec,nosuid,nodev,mode=1777",
    "/run": "rw,exec,nosuid,nodev,mode=755",
}
"""Folders in memory of a read-only container."""


def limits(engine: Engine, spec: EnvironmentSpec) -> dict[str, Any]:
    """Returns options of a host configuration that keep a task's container from filling disks."""
    options = bounds(engine, spec)
    if spec.reuse is Reuse.SHARED_READONLY:
        options |= {"read_only": True, "tmpfs": _WRITABLE}
    return options


def bounds(engine: Engine, spec: EnvironmentSpec) -> dict[str, Any]:
    """Returns the same for a container next to it, which may write, too."""
    options: dict[str, Any] = {"ulimits": _ulimits()}
    if has_quotas(engine):
        options["storage_opt"] = {"size": str(limit_of(spec))}
    return options


def _ulimits() -> list[Ulimit]:
    """Forbids core dumps, which would fill disks and start a program of the host; limits open files to the usual."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    files = [Ulimit(name="nofile", soft=most, hard=most)] if most >= _FEW_FILES else []
    return [Ulimit(name="core", soft=0, hard=0), *files]


def has_quotas(engine: Engine) -> bool:
    """Whether the engine takes `size` for a container: visible only on its own host. Checked once per engine."""
    if engine not in _quotas:
        _quotas[engine] = _has_quotas(engine.about)
    return _quotas[engine]


def _has_quotas(about: dict[str, Any]) -> bool:
    if about.get("Driver") in _SUBVOLUMES:
        return True
    try:
        return about.get("Driver") == "overlay2" and quotas_on(_MOUNTS.read_text(), Path(about["DockerRootDir"]))
    except (OSError, KeyError):
        return False


def quotas_on(mounts: str, folder: Path) -> bool:
    """Whether `folder` lies on a file system with quotas for folders, by the text of `mountinfo`."""
    best: tuple[int, bool] = (-1, False)
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        point, kind = Path(before.split()[4].replace("\\040", " ")), after.split()
        if folder.is_relative_to(point) and len(point.parts) >= best[0]:  # a later mount covers an earlier one
            best = len(point.parts), kind[0] == "xfs" and bool({"prjquota", "pquota"} & set(kind[2].split(",")))
    return best[1]


_quotas: WeakKeyDictionary[Engine, bool] = WeakKeyDictionary()


def watch_of(engine: Callable[[], Engine], settings: Settings) -> DiskWatch:
    """Returns a watch for the containers of an engine on this host."""
    root = Path(engine().about["DockerRootDir"])
    return DiskWatch(root, settings.home / "run" / "slots" / "docker-disk-watch", lambda: _sizes(engine()))


def in_sight(engine: Engine) -> bool:
    """Whether the engine's disk is one of this host's."""
    return engine.is_local and os.access(engine.about["DockerRootDir"], os.R_OK | os.X_OK)


def watched(watch: DiskWatch, environment: DockerEnvironment, spec: EnvironmentSpec) -> DockerEnvironment:
    """Watches an environment where what it writes is visible."""
    try:
        if environment.layer_in_sight or environment.written() is not None:  # measuring takes longer than this check
            watch.watch(environment, limit_of(spec))
    except StationError as error:  # its first command shows whether it works
        log.warning("environment.not_watched", environment=environment.id, reason=str(error))
    return environment


def _sizes(engine: Engine) -> dict[str, DiskUsage]:
    """Returns what every environment of the engine has written, by id; a project's under its main container, if any."""
    about = []
    with engine.named("measure environments", EnvironmentFailed):
        for item in engine.api.containers(all=True, filters={"label": f"{ROLE}=environment"}):
            with suppress(NotFound):  # gone meanwhile
                about.append(engine.api.inspect_container(item["Id"]))
    labels = {one["Id"]: one["Config"]["Labels"] for one in about}
    mains = {tags[PROJECT]: one for one, tags in labels.items() if PROJECT in tags and BESIDE not in tags}
    parts: dict[str, list[dict[str, Any]]] = {}
    for one in about:
        project = labels[one["Id"]].get(PROJECT)
        owner = one["Id"] if project is None else mains.get(project, project)
        parts.setdefault(owner, []).append(one)
    return {owner: usage_of(engine, item) for owner, item in parts.items()}
