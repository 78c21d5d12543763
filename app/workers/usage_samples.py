"""Samples memory and processor use of a worker's environments every five seconds, in one thread for all."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog

from app.environments.contract import Environment

log = structlog.get_logger()

EVERY_S = 5.0
MOST_SAMPLES = 2000
"""Limit per environment, an even number: then each two rows are merged, and later rows come half as often."""
_MOST_MARKS = 200
_IDLE_LOOKS = 60
"""Looks without an environment before the thread ends: on a busy host, starting a thread may be slow."""
_SHORTEST_S = 1.0
"""Shortest time since the last row for a last sample at the end of an environment."""
_HELD_UP = 0.1
"""Share of the time between two samples: longer throttling by the processor limit is marked."""

Row = tuple[int, float | None, float | None]
"""Whole seconds since `since`, memory in MiB, processors in use since the previous row."""


@dataclass(eq=False)
class UsageSeries:
    """Samples of one environment. since: start of its times, in seconds since 1970."""

    environment: Environment
    since: float
    rows: list[Row] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)  # second and event: `killed`, `throttled`
    step: int = 1  # looks per row
    _looks: int = 0
    _peak_bytes: int | None = None  # since the previous row
    _at: float = field(default_factory=time.monotonic)  # of the previous row
    _cpu_s: float | None = None
    _kills: int | None = None
    _held_up_s: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> bool:
        """Reads the counters' start values. False: the environment has no counters on this host."""
        usage = self.environment.usage()
        if usage is None:
            return False
        self._cpu_s, self._kills = usage.cpu_s, self.environment.memory_kills()
        self._held_up_s = self.environment.throttled_s()
        return True

    def look(self, *, last: bool = False) -> None:
        """Takes a sample; every `step` samples add a row. last: add a row in any case. Raises nothing."""
        with self._lock:
            now = time.monotonic()
            usage = None if last and now - self._at < _SHORTEST_S else self.environment.usage()
            if usage is None:
                return
            self._looks += 1
            if usage.memory_bytes is not None:
                self._peak_bytes = max(self._peak_bytes or 0, usage.memory_bytes)
            self._mark(now - self._at)
            if self._looks % self.step == 0 or last:
                self._add(now, usage.cpu_s)

    def _add(self, now: float, cpu_s: float | None) -> None:
        known = cpu_s is not None and self._cpu_s is not None
        cores = (
            round(max(0.0, (cpu_s or 0.0) - (self._cpu_s or 0.0)) / max(0.001, now - self._at), 2) if known else None
        )
        memory_mib = None if self._peak_bytes is None else round(self._peak_bytes / (1 << 20), 1)
        self.rows.append((self._second(), memory_mib, cores))
        self._at, self._cpu_s, self._peak_bytes = now, cpu_s, None
        if len(self.rows) >= MOST_SAMPLES:
            self.rows, self.step, self._looks = _halved(self.rows), 2 * self.step, 0

    def _mark(self, passed_s: float) -> None:
        kills, held_up_s = self.environment.memory_kills(), self.environment.throttled_s()
        if kills is not None and kills > (self._kills or 0):
            self._mark_one("killed")
        if held_up_s is not None and held_up_s - (self._held_up_s or 0.0) > _HELD_UP * min(passed_s, EVERY_S):
            self._mark_one("throttled")
        self._kills, self._held_up_s = kills, held_up_s

    def _mark_one(self, what: str) -> None:
        if len(self.marks) < _MOST_MARKS:
            self.marks.append((self._second(), what))

    def _second(self) -> int:
        return max(0, round(time.time() - self.since))

    def describe(self) -> dict[str, Any]:
        """Returns the series as it is recorded."""
        with self._lock:
            return {"since": round(self.since, 1), "rows": list(self.rows), "marks": list(self.marks)}


def _halved(rows: list[Row]) -> list[Row]:
    """Merges each two rows: the later time, the larger memory, the mean of the processors."""
    return [
        (
            second[0],
            max((one for one in (first[1], second[1]) if one is not None), default=None),
            None if first[2] is None or second[2] is None else round((first[2] + second[2]) / 2, 2),
        )
        for first, second in zip(rows[::2], rows[1::2], strict=False)
    ]


class UsageSampler:
    """Samples the environments of one worker. Its thread ends after a while without environments. Thread-safe."""

    def __init__(self, every_s: float = EVERY_S, idle_looks: int = _IDLE_LOOKS) -> None:
        self._every_s = every_s
        self._idle_looks = idle_looks
        self._lock = threading.Lock()
        self._series: list[UsageSeries] = []
        self._thread: threading.Thread | None = None

    @contextmanager
    def sampling(self, environment: Environment, since: float) -> Iterator[UsageSeries]:
        """Samples the environment during the block; the series is empty if this host shows no control group of it."""
        series = UsageSeries(environment, since)
        if not series.begin():
            yield series
            return
        with self._lock:
            self._series.append(series)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="usage-samples", daemon=True)
                self._thread.start()
        try:
            yield series
        finally:
            with self._lock:
                self._series.remove(series)
            series.look(last=True)

    def _work(self) -> None:
        idle = 0
        while True:
            time.sleep(self._every_s)
            with self._lock:
                series = list(self._series)
                idle = 0 if series else idle + 1
                if idle > self._idle_looks:
                    self._thread = None
                    return
            for one in series:
                try:
                    one.look()
                except Exception:  # a failed sample must not fail an environment
                    log.exception("usage.not_sampled")
