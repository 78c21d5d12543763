"""What a build may take: at least as much as its task; and which container is a step's."""

from __future__ import annotations

import json

from app.images.build_limits import BuildLimits
from app.models.spec import Resources


def test_a_build_may_take_what_its_task_may_and_what_compilers_need() -> None:
    small = BuildLimits.of(Resources(cpus=0.5, memory_bytes=64 << 20, pids=16, disk_bytes=64 << 20))
    assert small == BuildLimits(cpus=2.0, memory_bytes=2 << 30, pids=2048, disk_bytes=16 << 30)
    large = BuildLimits.of(Resources(cpus=8.0, memory_bytes=8 << 30, pids=9000, disk_bytes=99 << 30))
    assert large == BuildLimits(cpus=8.0, memory_bytes=8 << 30, pids=9000, disk_bytes=99 << 30)
    told = large.parameters
    assert (told["cpuquota"], told["cpuperiod"], told["memswap"]) == (800_000, 100_000, 8 << 30)
    assert json.loads(told["ulimits"]) == [{"Name": "core", "Soft": 0, "Hard": 0}]
