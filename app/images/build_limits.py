"""Limits CPU, memory and disk of image builds.

The engine's builder limits memory, CPU and core dumps of a step, but not processes. So the container of every step is
given that limit by its id, which the builder tells just before it starts it.
Nothing limits what a step writes: the engine's disk is watched, and a build that takes too much of it is ended.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from app.errors import DiskFull, EnvironmentFailed, ImageBuildFailed, StationError
from app.host.container_layer import places_of
from app.host.disk import DiskUsage
from app.host.disk_watch import LIMIT_BYTES, files_within
from app.host.engine import Engine
from app.images.image_index import Disk, disk_of
from app.models.spec import Resources

log = structlog.get_logger()

_LEAST = Resources(cpus=2.0, memory_bytes=2 << 30, pids=2048, disk_bytes=LIMIT_BYTES)
"""A build gets at least this much: compilers need more than the tests they build."""
_PERIOD_US = 100_000
_LOOK_S = 0.5
_GROWTH_BYTES = 32 << 20
"""So much more on the disk is worth a closer look."""
_CLOSER_LOOK_S = 10.0
_NEARLY_FULL = 0.98
"""A share of the disk at which every build ends, as environments do."""
_CALL_S = 30.0
_STEP = re.compile(r"Step \d+/\d+ : ")
_RUNNING = re.compile(r" ---> Running in ([0-9a-f]{12})\n?")


@dataclass(frozen=True, slots=True)
class BuildLimits:
    """Upper bounds: of each step, and, for `disk_bytes`, of what all steps write. `disk_mark`: a share of the disk."""

    cpus: float
    memory_bytes: int
    pids: int
    disk_bytes: int
    disk_mark: float = 1.0

    @classmethod
    def of(cls, task: Resources, disk_mark: float) -> BuildLimits:
        """For the image of a task. disk_mark: the high one of the settings."""
        return cls(
            cpus=max(_LEAST.cpus, task.cpus),
            memory_bytes=max(_LEAST.memory_bytes, task.memory_bytes),
            pids=max(_LEAST.pids, task.pids),
            disk_bytes=max(LIMIT_BYTES, task.disk_bytes or 0),
            disk_mark=disk_mark if disk_mark <= 1 else 1.0,
        )

    @property
    def parameters(self) -> dict[str, Any]:
        """As a build's parameters have them."""
        return {
            "memory": self.memory_bytes,
            "memswap": self.memory_bytes,
            "cpuperiod": _PERIOD_US,
            "cpuquota": round(self.cpus * _PERIOD_US),
            "ulimits": json.dumps([{"Name": "core", "Soft": 0, "Hard": 0}]),
        }


class BuildWatch:
    """Watches one build while it runs, in a thread of its own.

    stop: ends the build; called once at most, after which `failure` says why.
    """

    def __init__(self, engine: Engine, doing: str, limits: BuildLimits, stop: Callable[[], None]) -> None:
        self.failure: StationError | None = None
        self._engine = engine
        self._doing = doing
        self._limits = limits
        self._stop = stop
        self._ended = threading.Event()
        self._step_begins = False
        self._step: tuple[str, list[Path]] = "", []  # its container, and where that writes
        self._written: dict[str, DiskUsage] = {}  # by container
        self._thread = threading.Thread(target=self._go_on, name="build-watch", daemon=True)

    def __enter__(self) -> BuildWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    # --- Steps ----------------------------------------------------------------------------------------------------

    def said(self, text: str) -> None:
        """What the builder or a step said. The first container that is named after a step begins is the step's."""
        if _STEP.match(text):
            self._step_begins = True
        elif self._step_begins and (found := _RUNNING.fullmatch(text)):
            self._step_begins = False
            self._bound(found[1])

    def _bound(self, container: str) -> None:
        """Bound the step's processes, and know where it writes."""
        api = self._engine.api
        try:
            with self._engine.named(f"look for {container}", EnvironmentFailed):
                about = api.inspect_container(container)
                told = about["HostConfig"]
                if (told["Memory"], told["CpuQuota"]) != self._log_as():
                    log.debug("build.not_a_step", build=self._doing, container=container)
                    return  # no container of this build: a step has printed that line
                url = f"{api.base_url}/v{api.api_version}/containers/{about['Id']}/update"
                reply = api.post(url, json={"PidsLimit": self._limits.pids}, timeout=_CALL_S)
                if reply.status_code not in (200, 404, 409):  # else it is gone already
                    log.warning("build.step_not_bounded", build=self._doing, reason=reply.text.strip())
        except StationError as error:  # most likely it is gone already
            log.debug("build.step_not_seen", build=self._doing, reason=str(error))
            return
        self._step = str(about["Id"]), places_of(self._engine, about)

    def _log_as(self) -> tuple[int, int]:
        """A step's limits as its container has them: an engine that cannot hold one of them has 0 there."""
        ours, able = self._limits.parameters, self._engine.about
        return (
            ours["memory"] if able.get("MemoryLimit", True) else 0,
            ours["cpuquota"] if able.get("CpuCfsQuota", True) else 0,
        )

    # --- The disk -------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        try:
            disk = disk_of(self._engine)
        except StationError:
            disk = None
        if disk is None:
            return  # the engine's disk cannot be seen from here
        mark = min(self._limits.disk_mark, _NEARLY_FULL)
        if disk.share >= mark:  # before we came
            mark = _NEARLY_FULL
        used_bytes, looked = disk.used_bytes, time.monotonic()
        while not self._ended.wait(_LOOK_S):
            try:
                disk = disk_of(self._engine)
                if disk is None:
                    return
                if disk.share >= mark:
                    self._end(self._full(disk, mark))
                    return
                if disk.used_bytes > used_bytes + _GROWTH_BYTES or time.monotonic() - looked > _CLOSER_LOOK_S:
                    used_bytes, looked = disk.used_bytes, time.monotonic()
                    if (much := self._too_much(self._measured())) is not None:
                        self._end(much)
                        return
                used_bytes = min(used_bytes, disk.used_bytes)
            except (OSError, StationError) as error:
                log.warning("build.not_watched", build=self._doing, reason=str(error))

    def _measured(self) -> DiskUsage:
        """What the steps have written, as far as it was seen."""
        container, places = self._step
        if container:
            found, known = DiskUsage.of(*places), self._written.get(container, DiskUsage())
            self._written[container] = DiskUsage(max(found.size_bytes, known.size_bytes), max(found.files, known.files))
        return self._all()

    def _all(self) -> DiskUsage:
        return DiskUsage.added(self._written.values())

    def _full(self, disk: Disk, mark: float) -> DiskFull:
        return DiskFull(
            f"{self._doing}: stopped, because the engine's disk is {disk.share:.1%} full, and builds go on up to "
            f"{mark:.1%}; its steps had written {self._all().size_bytes} bytes as last seen. Free some "
            "with `megaflow images evict`, or look at what the recipe writes."
        )

    def _too_much(self, written: DiskUsage) -> ImageBuildFailed | None:
        most, most_files = self._limits.disk_bytes, files_within(self._limits.disk_bytes)
        if written.size_bytes > most:
            said = f"wrote {written.size_bytes} bytes, and {most} are"
        elif written.files > most_files:
            said = f"made {written.files} files, and {most_files} are"
        else:
            return None
        return ImageBuildFailed(
            f"{self._doing}: stopped, because its steps {said} allowed; write less, or give the task a larger disk"
            " limit."
        )

    def _end(self, failure: StationError) -> None:
        self.failure = failure
        self._stop()
