"""Limits CPU, memory and disk of image builds.

The engine's builder limits memory, CPU and core dumps of a step, but not processes. That limit is set on the container
of every step by its id, which the builder prints just before the step starts.
Nothing limits what a step writes: the engine's disk is watched as for environments, and a build that writes too much
is ended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from app.errors import DiskFull, EnvironmentFailed, HostDiskFull, ImageBuildFailed, StationError
from app.host.container_layer import places_of
from app.host.disk import DiskUsage
from app.host.disk_watch import LIMIT_BYTES, DiskWatch
from app.host.engine import Engine
from app.images.image_index import disk_of
from app.models.spec import Resources

log = structlog.get_logger()

_LEAST = Resources(cpus=2.0, memory_bytes=2 << 30, pids=2048, disk_bytes=LIMIT_BYTES)
"""Minimum limits of a build: compilers need more than the tests they build."""
_PERIOD_US = 100_000
_CALL_S = 30.0
_STEP = re.compile(r"Step \d+/\d+ : ")
_RUNNING = re.compile(r" ---> Running in ([0-9a-f]{12})\n?")


@dataclass(frozen=True, slots=True)
class BuildLimits:
    """Upper bounds for each step; `disk_bytes`: for what all steps write together."""

    cpus: float
    memory_bytes: int
    pids: int
    disk_bytes: int

    @classmethod
    def of(cls, task: Resources) -> BuildLimits:
        """Computes the limits for the image of a task."""
        return cls(
            cpus=max(_LEAST.cpus, task.cpus),
            memory_bytes=max(_LEAST.memory_bytes, task.memory_bytes),
            pids=max(_LEAST.pids, task.pids),
            disk_bytes=max(LIMIT_BYTES, task.disk_bytes or 0),
        )

    @property
    def parameters(self) -> dict[str, Any]:
        """The limits as parameters of a build."""
        return {
            "memory": self.memory_bytes,
            "memswap": self.memory_bytes,
            "cpuperiod": _PERIOD_US,
            "cpuquota": round(self.cpus * _PERIOD_US),
            "ulimits": json.dumps([{"Name": "core", "Soft": 0, "Hard": 0}]),
        }


class BuildWatch:
    """Watches a build. turns: lock file for one check at a time. stop: ends the build; `failure` has the reason."""

    def __init__(self, engine: Engine, doing: str, limits: BuildLimits, turns: Path, stop: Callable[[], None]) -> None:
        self.id = doing
        self.gone = False
        self.failure: StationError | None = None
        self._engine = engine
        self._limits = limits
        self._turns = turns
        self._stop = stop
        self._step_begins = False
        self._step: tuple[str, list[Path]] = "", []  # its container, and the folders where it writes
        self._written: dict[str, DiskUsage] = {}  # by container

    def __enter__(self) -> BuildWatch:
        try:
            if disk_of(self._engine) is not None:  # else the disk is not visible here
                root = Path(self._engine.about["DockerRootDir"])
                watch = DiskWatch(root, self._turns, lambda: {self.id: self.written()})
                watch.watch(self, self._limits.disk_bytes)
        except StationError as error:
            log.warning("build.not_watched", build=self.id, reason=str(error))
        return self

    def __exit__(self, *_: object) -> None:
        self.gone = True

    def read_line(self, text: str) -> None:
        """Reads a line of the builder or of a step. The first container named after a step begins is the step's."""
        if _STEP.match(text):
            self._step_begins = True
        elif self._step_begins and (match := _RUNNING.fullmatch(text)):
            self._step_begins = False
            self._bound(match[1])

    def _bound(self, container: str) -> None:
        api = self._engine.api
        try:
            with self._engine.named(f"look for {container}", EnvironmentFailed):
                about = api.inspect_container(container)
                limits = about["HostConfig"]
                if (limits["Memory"], limits["CpuQuota"]) != self._as_engine_has_them():
                    log.debug("build.not_a_step", build=self.id, container=container)
                    return  # no container of this build: a step printed that line
                url = f"{api.base_url}/v{api.api_version}/containers/{about['Id']}/update"
                reply = api.post(url, json={"PidsLimit": self._limits.pids}, timeout=_CALL_S)
                is_gone = reply.status_code in (404, 409) or "marked for removal" in reply.text  # status 500
                if reply.status_code != 200 and not is_gone:
                    log.warning("build.step_not_bounded", build=self.id, reason=reply.text.strip())
        except StationError as error:  # probably it is gone already
            log.debug("build.step_not_seen", build=self.id, reason=str(error))
            return
        self._step = str(about["Id"]), places_of(self._engine, about)

    def _as_engine_has_them(self) -> tuple[int, int]:
        """Returns a step's limits as its container has them. A limit that the engine does not support is 0 there."""
        ours, able = self._limits.parameters, self._engine.about
        return (
            ours["memory"] if able.get("MemoryLimit", True) else 0,
            ours["cpuquota"] if able.get("CpuCfsQuota", True) else 0,
        )

    def written(self) -> DiskUsage:
        """Returns what the steps have written, as far as it was observed."""
        container, places = self._step
        if container:
            usage, known = DiskUsage.of(*places), self._written.get(container, DiskUsage())
            self._written[container] = DiskUsage(max(usage.size_bytes, known.size_bytes), max(usage.files, known.files))
        return DiskUsage.added(self._written.values())

    def fail(self, why: str, *, kind: type[EnvironmentFailed]) -> None:
        """Ends the build."""
        ours = DiskFull if issubclass(kind, HostDiskFull) else ImageBuildFailed
        self.failure = ours(f"{self.id}: stopped: {why}; write less, or give the task a larger disk limit.")
        self.gone = True
        self._stop()
