"""Part 3, hold: waves of equal tasks that all run at once, each with lease, doors and end through the real ledger.

A wave's time is held against one task's own time plus the stated ramp: what dispatch may take for so many at the rate
that part 2 has to reach. The simulation plays the workers; its own cost is shown and is not the control plane's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime

from app.models.spec import Mode
from bench.control_dispatch import GOAL_PER_S
from bench.control_figures import most_at_once
from bench.control_meter import CONTROL_PLANE, Meter, metering
from bench.control_record import Part
from bench.control_system import Say, Span, System, running
from bench.record import Row, row

GOAL_CORES = 0.3
GOAL_MEMORY_BYTES = 2 << 30
GOAL_WAVE = 1.05
SLOTS = 100
"""Of one standing instance."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    waves: tuple[tuple[int, float], ...] = ((10, 30.0), (100, 30.0), (1_000, 30.0), (10_000, 60.0))
    """Tasks at once, and seconds of each."""
    modes: tuple[Mode, ...] = (Mode.PERSISTENT, Mode.EPHEMERAL)
    cores: float = GOAL_CORES
    memory_bytes: int = GOAL_MEMORY_BYTES


CROWD = Scale(waves=((50_000, 150.0),), modes=(Mode.PERSISTENT,), cores=1.0, memory_bytes=1 << 30)
"""Five times as many, with goals of its own: `--part crowd`."""
QUICK = Scale(waves=((300, 3.0),), modes=(Mode.PERSISTENT,))


@dataclass(frozen=True, slots=True)
class Wave:
    """One wave. `alone_s` is one task's time by itself, from accepted to finished."""

    mode: str
    tasks: int
    run_s: float
    alone_s: float
    wave_s: float
    ramp_s: float
    """From the first accepted to the last claimed, as it was."""
    most_at_once: int
    lost: int
    """Tasks that did not succeed, or took more than one attempt."""
    cores: dict[str, float]
    holding_cores: dict[str, float]
    """While all of them run and none begins or ends."""
    peak_cores: float
    memory_bytes: dict[str, int]
    lease_writes_per_s: float
    commits_per_s: float
    wal_bytes_per_s: float

    @property
    def stated_ramp_s(self) -> float:
        return self.tasks / GOAL_PER_S

    @property
    def stretch(self) -> float:
        """The wave's time to what was promised."""
        return self.wave_s / (self.alone_s + self.stated_ramp_s)


def measure(scale: Scale, say: Say) -> Part:
    """Every wave in every mode. Raises: MegaFlowError, RuntimeError: the stack did not do its work."""
    waves = [wave for mode in scale.modes for wave in _waves(scale, mode, say)]
    stated = {f"{wave.mode} {wave.tasks}": wave.stated_ramp_s for wave in waves}
    return Part(_rows(waves, scale), {"waves": waves, "stated_ramp_s": stated, "scale": scale})


def _waves(scale: Scale, mode: Mode, say: Say) -> list[Wave]:
    most = max(tasks for tasks, _ in scale.waves)
    pool = {"persistent_instances": -(-most // SLOTS), "persistent_slots": SLOTS}
    sizes = pool if mode is Mode.PERSISTENT else {"persistent_instances": 0, "ephemeral_capacity": most}
    found: list[Wave] = []
    alone: dict[float, float] = {}
    with running("constant:1", **sizes) as system:
        if mode is Mode.PERSISTENT:
            system.until_pool_stands(pool["persistent_instances"])
        system.until_ended(system.submit(10, mode=mode), timeout_s=60)
        for tasks, run_s in scale.waves:
            say(f"a wave of {tasks} {mode.value} tasks of {run_s:g} s")
            system.behave(f"constant:{run_s:g}")
            if run_s not in alone:
                alone[run_s] = _alone_s(system, mode, run_s)
            found.append(_wave(system, mode, tasks, run_s, alone[run_s]))
    return found


def _alone_s(system: System, mode: Mode, run_s: float) -> float:
    run = system.submit(1, mode=mode)
    system.until_ended(run, timeout_s=run_s + 60)
    return _wave_s(system.spans(run.run_id))


def _wave_s(spans: list[Span]) -> float:
    finished = [span.finished for span in spans if span.finished is not None]
    return (max(finished) - min(span.accepted for span in spans)).total_seconds()


def _wave(system: System, mode: Mode, tasks: int, run_s: float, alone_s: float) -> Wave:
    # What autovacuum does when nothing runs: plans made of such statistics have to carry the next crowd all the same.
    system.connection.execute("ANALYZE")
    with metering(system.stack) as meter:
        begun = time.monotonic()
        run = system.submit(tasks, mode=mode)
        system.until_ended(run, timeout_s=3 * run_s + 120)
    spans = system.spans(run.run_id)
    ramp_s = (max(claimed for claimed, _ in _ran(spans)) - min(s.accepted for s in spans)).total_seconds()
    holding = _holding(meter, begun + ramp_s, begun + run_s)
    return Wave(
        mode.value,
        tasks,
        run_s,
        alone_s,
        _wave_s(spans),
        ramp_s,
        most_at_once(_ran(spans)),
        sum(span.state != "succeeded" or span.attempts != 1 for span in spans),
        meter.cores,
        holding.cores,
        meter.peak_cores,
        meter.memory_bytes,
        holding.per_s("lease_writes"),
        meter.per_s("commits"),
        meter.per_s("wal_bytes"),
    )


def _ran(spans: list[Span]) -> list[tuple[datetime, datetime]]:
    return [(span.claimed, span.finished) for span in spans if span.claimed and span.finished]


def _holding(meter: Meter, since: float, until: float) -> Meter:
    """Between the last claim and the first end. A wave that was never whole has no such time: all of it, then."""
    found = meter.within(since, until)
    return found if len(found.readings) > 2 else meter


def _rows(waves: list[Wave], scale: Scale) -> list[Row]:
    rows = []
    for wave in waves:
        at = f"hold, {wave.tasks} {wave.mode}"
        memory = wave.memory_bytes[CONTROL_PLANE] / (1 << 20)
        rows += [
            row(f"{at}: running at once", wave.most_at_once, "attempts", goal=wave.tasks),
            row(f"{at}: lost", wave.lost, "tasks", goal=0, better="less"),
            row(f"{at}: wave to one task and stated ramp", wave.stretch, "x", goal=GOAL_WAVE, better="less"),
            row(f"{at}: ramp as it was", wave.ramp_s, "s"),
            row(f"{at}: control plane", wave.cores[CONTROL_PLANE], "cores", goal=scale.cores, better="less"),
            row(f"{at}: control plane while all run", wave.holding_cores[CONTROL_PLANE], "cores"),
            row(f"{at}: control plane, busiest second", wave.peak_cores, "cores"),
            row(f"{at}: control plane memory", memory, "MiB", goal=scale.memory_bytes / (1 << 20), better="less"),
            row(f"{at}: the simulated workers' host", wave.cores["simulation"], "cores"),
            row(f"{at}: lease writes while all run", wave.lease_writes_per_s, "rows/s"),
            row(f"{at}: transactions", wave.commits_per_s, "1/s"),
            row(f"{at}: write-ahead log", wave.wal_bytes_per_s / 1e6, "MB/s"),
        ]
    return rows
