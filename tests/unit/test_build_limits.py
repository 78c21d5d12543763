"""What a build may take: at least as much as its task; and which container is a step's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

from app.host.engine import Engine
from app.images.build_limits import BuildLimits, BuildWatch
from app.models.spec import Resources

LIMITS = BuildLimits.of(Resources())


def test_a_build_may_take_what_its_task_may_and_what_compilers_need() -> None:
    small = BuildLimits.of(Resources(cpus=0.5, memory_bytes=64 << 20, pids=16, disk_bytes=64 << 20))
    assert small == BuildLimits(cpus=2.0, memory_bytes=2 << 30, pids=2048, disk_bytes=16 << 30)
    large = BuildLimits.of(Resources(cpus=8.0, memory_bytes=8 << 30, pids=9000, disk_bytes=99 << 30))
    assert large == BuildLimits(cpus=8.0, memory_bytes=8 << 30, pids=9000, disk_bytes=99 << 30)
    told = large.parameters
    assert (told["cpuquota"], told["cpuperiod"], told["memswap"]) == (800_000, 100_000, 8 << 30)
    assert json.loads(told["ulimits"]) == [{"Name": "core", "Soft": 0, "Hard": 0}]


class _Watched(BuildWatch):
    """Notes which containers it would bound."""

    def __init__(self) -> None:
        super().__init__(cast(Engine, None), "build x", LIMITS, Path("turns"), lambda: None)
        self.bounded: list[str] = []

    def _bound(self, container: str) -> None:
        self.bounded.append(container)


def test_the_first_container_that_is_named_after_a_step_begins_is_the_steps() -> None:
    watch = _Watched()
    own, other = "a" * 12, "b" * 12
    watch.said(f" ---> Running in {other}\n")  # before any step
    for text in ("Step 1/2 : RUN echo\n", f" ---> Running in {own}\n", f" ---> Running in {other}\n", "Removing\n"):
        watch.said(text)
    watch.said("Step 2/2 : RUN true\n")
    for text in (f"x ---> Running in {other}\n", f" ---> Running in {other}", f" ---> Running in {own}\n"):
        watch.said(text)
    assert watch.bounded == [own, other]
