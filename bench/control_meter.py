"""What the control plane costs while something else is measured: processor, memory, leases, write-ahead log."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import psycopg

from app.stack.private import SIMULATION, PrivateStack

_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters at one moment; all of them only grow, except the memory."""

    at: float  # monotonic seconds
    cpu_s: dict[str, float]  # by program
    memory_bytes: dict[str, int]
    lease_writes: int
    commits: int
    wal_bytes: int


@dataclass(slots=True)
class Meter:
    """Readings of a block, one a second."""

    readings: list[Reading] = field(default_factory=list)

    def within(self, since: float, until: float) -> Meter:
        """Only what was read between two moments (monotonic seconds)."""
        return Meter([reading for reading in self.readings if since <= reading.at <= until])

    @property
    def cores(self) -> dict[str, float]:
        """Processor seconds per second, by program; the whole of the control plane as `control plane`."""
        first, last = self.readings[0], self.readings[-1]
        seconds = last.at - first.at
        used = {name: (last.cpu_s[name] - first.cpu_s.get(name, 0.0)) / seconds for name in last.cpu_s}
        return {**used, CONTROL_PLANE: sum(used[name] for name in of_control_plane(used))}

    @property
    def peak_cores(self) -> float:
        """The control plane's busiest second."""
        return max((Meter([one, two]).cores[CONTROL_PLANE] for one, two in pairwise(self.readings)), default=0.0)

    @property
    def memory_bytes(self) -> dict[str, int]:
        """The most that was seen, by program; memory that processes share is counted once (PSS)."""
        names = {name for reading in self.readings for name in reading.memory_bytes}
        most = {name: max(reading.memory_bytes.get(name, 0) for reading in self.readings) for name in names}
        ours = (sum(r.memory_bytes[name] for name in of_control_plane(r.memory_bytes)) for r in self.readings)
        return {**most, CONTROL_PLANE: max(ours)}

    def per_s(self, counter: str) -> float:
        """Growth of `lease_writes`, `commits` or `wal_bytes`."""
        first, last = self.readings[0], self.readings[-1]
        return float(getattr(last, counter) - getattr(first, counter)) / (last.at - first.at)


CONTROL_PLANE = "control plane"


def of_control_plane(names: dict[str, float] | dict[str, int]) -> Sequence[str]:
    """Control worker, PostgreSQL and Redis. The simulation plays the workers, which are not of it."""
    return [name for name in names if name not in (SIMULATION, CONTROL_PLANE)]


@contextmanager
def metering(stack: PrivateStack) -> Iterator[Meter]:
    """Read once at the start, once at the end, and each second between."""
    meter, done = Meter(), threading.Event()
    with psycopg.connect(stack.settings.database(), autocommit=True) as connection:
        meter.readings.append(_read(stack, connection))

        def go_on() -> None:
            while not done.wait(_EVERY_S):
                meter.readings.append(_read(stack, connection))

        thread = threading.Thread(target=go_on, name="meter", daemon=True)
        thread.start()
        try:
            yield meter
        finally:
            done.set()
            thread.join()
        meter.readings.append(_read(stack, connection))


def _read(stack: PrivateStack, connection: psycopg.Connection) -> Reading:
    usage = stack.usage()
    row = connection.execute(
        "SELECT (SELECT coalesce(n_tup_ins + n_tup_upd, 0) FROM pg_stat_user_tables WHERE relname = 'leases'),"
        " (SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()),"
        " pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint"
    ).fetchone()
    assert row is not None
    return Reading(
        time.monotonic(),
        {name: used.cpu_s for name, used in usage.items()},
        {name: used.memory_bytes for name, used in usage.items()},
        *row,
    )
