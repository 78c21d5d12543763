"""One control group around all containers of a project: main has what its task may have, the rest as much again.

Below it each container keeps its own bounds. It needs an engine on this host that keeps its groups in the file system,
and a process that may make some there: elsewhere the containers are bounded one by one.
"""

from __future__ import annotations

import os
from contextlib import suppress

import structlog

from app.host.cgroups import Cgroup
from app.host.engine import Engine
from app.images.disk_thresholds import disk_of
from app.models.spec import Resources

log = structlog.get_logger()

BOUNDED_APART = "resources: no control group could be made around all services: each alone is held to the task's limits"
_REMOVAL_S = 2.0


def around(most: Resources) -> Resources:
    """What all services may have together when `most` is what one may have: the same for all that are not the main one.

    The formats size a task by the container in which the agent works; a database beside it takes nothing of that.
    """
    return most.model_copy(update={"cpus": 2 * most.cpus, "memory_bytes": 2 * most.memory_bytes, "pids": 2 * most.pids})


def make(engine: Engine, project: str, most: Resources) -> str | None:
    """Its name, as an engine takes it; None: none can be made here. One that stands is as if it were new.

    Raises: EngineUnavailable, EnvironmentFailed.
    """
    if engine.about.get("CgroupDriver") != "cgroupfs" or disk_of(engine) is None:  # systemd's, or another host's
        return None
    group = _group(project)
    try:
        group.make(most, devices=None)
        for folder in group.folders:
            _count_all_below(folder / "memory.use_hierarchy")
            os.utime(folder)  # the sweeper goes by it
    except OSError as error:
        log.debug("environment.no_project_cgroup", project=project, reason=str(error))
        remove(project)
        return None
    return f"/{group.folders[0].name}"


def remove(project: str, *, timeout_s: float = _REMOVAL_S) -> None:
    """Not while somebody is in it, for as long as this: then a later sweep does. Not there: fine."""
    with suppress(OSError):  # a host that has none at all
        if not _group(project).remove(timeout_s=timeout_s):
            log.debug("environment.project_cgroup_left", project=project)


def _group(project: str) -> Cgroup:
    return Cgroup(f"project-{project}")


def _count_all_below(switch: os.PathLike[str]) -> None:
    """What version 1 did only when told before Linux 5.11."""
    if os.path.exists(switch):
        with open(switch, "r+") as file:
            if file.read().strip() == "0":
                file.write("1")
