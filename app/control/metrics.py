"""Metrics for Prometheus, read from the ledger at each scrape, so that they survive restarts.

Ended attempts are counted once and summed up: a scrape reads only those that finished since the last scrape. The newest
are left for the next scrape, since an attempt's teardown is recorded a moment after its end.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta

import structlog
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from sqlalchemy import text

from app.errors import DatabaseUnavailable, SettingsInvalid
from app.ledger import environment_times, limits
from app.ledger.database import Database
from app.ledger.environment_times import BUCKETS_S, PhaseHistogram
from app.models.states import InstanceState, TaskState
from app.settings import Settings

log = structlog.get_logger()

TEARDOWN_S = 15.0
"""Seconds from an attempt's end until it is counted: its teardown is recorded by then."""
_ENDED_INSTANCES = (InstanceState.TERMINATED, InstanceState.FAILED)


class LedgerCollector(Collector):
    """Collects all metrics from the ledger. `settle_s`: see TEARDOWN_S. Safe to share between threads."""

    def __init__(self, settings: Settings, database: Database, *, settle_s: float = TEARDOWN_S) -> None:
        self._settings, self._database, self._settle_s = settings, database, settle_s
        self._lock = threading.Lock()
        self._until: datetime | None = None
        self._ended: Counter[tuple[str, str]] = Counter()
        self._times: Mapping[str, PhaseHistogram] = {}

    def collect(self) -> Iterator[Metric]:
        """Yields all metric families; only `megaflow_ledger_up` while the database is unavailable."""
        with self._lock:
            try:
                families = [*self._count(), *self._gauges(), *self._limits()]
            except DatabaseUnavailable as error:
                log.warning("metrics.ledger_silent", error=str(error))
                families = []
        yield GaugeMetricFamily("megaflow_ledger_up", "1 while PostgreSQL answers.", value=float(bool(families)))
        yield from families

    def _count(self) -> list[Metric]:
        with self._database.begin() as connection:
            now = connection.execute(text("SELECT clock_timestamp()")).scalar_one()
            until = now - timedelta(seconds=self._settle_s)
            ended = environment_times.ended(connection, self._until, until)
            times = environment_times.histograms(connection, self._until, until)
        self._ended, self._until = self._ended + ended, until
        self._times = environment_times.added(self._times, times)
        return [_ended(self._ended), _phases(self._times)]

    def _gauges(self) -> list[Metric]:
        with self._database.begin() as connection:
            now = environment_times.counts_now(connection)
        tasks = GaugeMetricFamily("megaflow_tasks", "Tasks by state.", labels=["state"])
        for state in TaskState:
            tasks.add_metric([state.value], now.tasks.get(state.value, 0))
        instances = GaugeMetricFamily("megaflow_instances", "Living instances by state.", labels=["mode", "state"])
        modes = sorted({mode for mode, _ in now.instances})
        for mode, living in ((mode, one) for mode in modes for one in InstanceState if one not in _ENDED_INSTANCES):
            instances.add_metric([mode, living.value], now.instances.get((mode, living.value), 0))
        labels = ["resource_class", "mode"]
        waiting = GaugeMetricFamily("megaflow_waiting_tasks", "Tasks that wait to be admitted.", labels=labels)
        for (resource_class, mode), count in sorted(now.waiting.items()):
            waiting.add_metric([resource_class, mode], count)
        return [tasks, instances, waiting]

    def _limits(self) -> list[Metric]:
        held = GaugeMetricFamily("megaflow_limit_held", "Places of a limit that are taken.", labels=["limit"])
        capacity = GaugeMetricFamily("megaflow_limit_capacity", "Places that a limit has.", labels=["limit"])
        waiting = GaugeMetricFamily("megaflow_limit_waiting", "Who waits for a place.", labels=["limit"])
        for use in limits.show(self._database, self._settings):
            for family, value in ((held, use.used), (capacity, use.capacity), (waiting, use.waiting)):
                if value is not None:
                    family.add_metric([use.name], value)
        return [held, capacity, waiting]


def _ended(counts: Mapping[tuple[str, str], int]) -> Metric:
    labels = ["mode", "end_reason"]
    family = CounterMetricFamily("megaflow_attempts_ended", "Attempts that have ended.", labels=labels)
    for (mode, reason), count in sorted(counts.items()):
        family.add_metric([mode, reason], count)
    return family


def _phases(times: Mapping[str, PhaseHistogram]) -> Metric:
    family = HistogramMetricFamily(
        "megaflow_environment_phase_seconds",
        "How long environments took, by kind, path (cold, recycled, snapshot, shared, failed) and phase.",
        labels=["kind", "path", "phase"],
    )
    for one in times.values():
        reached, buckets = 0, []
        for bound, count in zip((*BUCKETS_S, float("inf")), one.counts, strict=True):
            reached += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(reached)))
        family.add_metric([one.kind, one.path, one.phase], buckets=buckets, sum_value=one.sum_s)
    return family


def exposition(settings: Settings, database: Database) -> str:
    """Returns all metrics up to this moment, in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(LedgerCollector(settings, database, settle_s=0))
    return generate_latest(registry).decode()


def serve(settings: Settings, database: Database) -> Callable[[], None]:
    """Answers scrapes at `settings.bind`:`settings.metrics_port` until the returned function is called.

    Nothing is served when the port is 0. Raises: SettingsInvalid: the port cannot be bound.
    """
    if settings.metrics_port == 0:
        return lambda: None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(LedgerCollector(settings, database))
    try:
        server, thread = start_http_server(settings.metrics_port, addr=settings.bind, registry=registry)
    except OSError as error:
        raise SettingsInvalid(
            f"expected MEGAFLOW_METRICS_PORT to be free at {settings.bind}, found {settings.metrics_port}: {error}."
        ) from error
    log.info("metrics.served", address=settings.bind, port=settings.metrics_port)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
