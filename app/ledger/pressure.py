"""Records the pressure of hosts, the load of engines and failing pools, on which admission depends.

Hosts and gateways report every two seconds; reports older than `FRESH_S` are ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

from sqlalchemy import Connection, text

from app.ledger.database import Database, sql
from app.ledger.waiting import QueueKey
from app.models.instance import queue_of
from app.models.spec import Mode

FRESH_S = 15.0
"""Seconds after which a report is ignored."""


@dataclass(frozen=True, slots=True)
class HostPressure:
    """Pressure that a host reports.

    cpu: share of the last seconds in which some process waited for a CPU. memory_available: share of all memory.
    """

    cores: int
    cpu: float
    memory_available: float


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load of one engine. kv_use: share of its KV cache in use, if reported."""

    url: str
    models: tuple[str, ...]  # named by calls of the last seconds
    inside: int  # calls in the engine
    waiting: int  # calls that wait for it at the gateway
    queued: int  # of `inside`: in the engine's own queue, if reported
    refused: int  # calls that it refused as too many in the last seconds (429, 503)
    kv_use: float | None = None

    @property
    def text(self) -> str:
        kv = "" if self.kv_use is None else f", {self.kv_use:.0%} of its KV cache in use"
        waiting = self.waiting + self.queued
        return f"{self.url} has {self.inside} calls, {waiting} wait, {self.refused} refused in the last seconds{kv}"


def report_host(database: Database, host: str, pressure: HostPressure) -> None:
    """Stores a host's report, if its row exists (`host_images.report` inserts it). Raises: DatabaseUnavailable."""
    database.sql(
        "UPDATE hosts SET cores = :cores, cpu_pressure = :cpu, memory_available = :memory_available,"
        " pressure_at = clock_timestamp() WHERE name = :host",
        {"host": host, **asdict(pressure)},
    )


_REPORT = text("""
INSERT INTO engine_loads (gateway, url, models, inside, waiting, queued, refused, kv_use)
VALUES (:gateway, :url, CAST(:models AS text[]), :inside, :waiting, :queued, :refused, :kv_use)
ON CONFLICT (gateway, url) DO UPDATE SET models = excluded.models, inside = excluded.inside,
    waiting = excluded.waiting, queued = excluded.queued, refused = excluded.refused, kv_use = excluded.kv_use,
    at = clock_timestamp()
""")


def report_engines(database: Database, gateway: str, loads: Collection[EngineLoad]) -> None:
    """Stores the load of a gateway's engines; `gateway` is a unique name. Raises: DatabaseUnavailable."""
    with database.begin() as connection:
        rows = [{"gateway": gateway, **asdict(load), "models": list(load.models)} for load in loads]
        if rows:
            connection.execute(_REPORT, sorted(rows, key=lambda row: str(row["url"])))
        sql(
            connection,
            "DELETE FROM engine_loads WHERE at < clock_timestamp() - make_interval(secs => :age)",
            {"age": 4 * FRESH_S},
        )


def engines(connection: Connection) -> list[EngineLoad]:
    """Returns engines that gateways reported in the last seconds; several reports of one engine are combined."""
    rows = sql(
        connection,
        "SELECT url, array_agg(DISTINCT model) AS models, sum(inside) FILTER (WHERE n = 1) AS inside,"
        " sum(waiting) FILTER (WHERE n = 1) AS waiting, max(queued) AS queued,"
        " sum(refused) FILTER (WHERE n = 1) AS refused, max(kv_use) AS kv_use FROM engine_loads"
        " CROSS JOIN LATERAL unnest(models) WITH ORDINALITY AS m(model, n)"
        " WHERE at > clock_timestamp() - make_interval(secs => :age) GROUP BY url ORDER BY url",
        {"age": FRESH_S},
    )
    return [EngineLoad(**row._asdict() | {"models": tuple(row.models)}) for row in rows]


@dataclass(frozen=True, slots=True)
class HostLoad:
    """A host that reports, with its standing instances of one resource class."""

    host: str
    resource_class: str
    slots: int  # of ready instances
    running: int  # attempts
    pressure: HostPressure
    at: datetime  # of the report

    @property
    def text(self) -> str:
        cpu, memory = self.pressure.cpu, self.pressure.memory_available
        return f"on {self.host} processes wait for a CPU {cpu:.0%} of the time, {memory:.0%} of the memory is available"


_HOSTS = text("""
SELECT h.name AS host, i.resource_class, coalesce(sum(i.slots) FILTER (WHERE i.state = 'ready'), 0)::int AS slots,
    coalesce(sum(r.running), 0)::int AS running, h.cores, h.cpu_pressure AS cpu,
    h.memory_available, h.pressure_at
FROM hosts h JOIN instances i ON i.host = h.name
CROSS JOIN LATERAL (SELECT count(*) AS running FROM attempts a
    WHERE a.instance_id = i.id AND a.finished_at IS NULL AND a.state = 'running') r
WHERE i.mode = 'persistent' AND i.state IN ('ready', 'draining')
    AND h.pressure_at > clock_timestamp() - make_interval(secs => :age)
GROUP BY h.name, i.resource_class ORDER BY 1, 2
""")


def hosts(connection: Connection) -> list[HostLoad]:
    """Returns hosts that reported in the last seconds and have standing instances, once for each class of these."""
    rows = connection.execute(_HOSTS, {"age": FRESH_S})
    return [
        HostLoad(
            *(r.host, r.resource_class, r.slots, r.running),
            HostPressure(r.cores, r.cpu, r.memory_available),
            r.pressure_at,
        )
        for r in rows
    ]


def live_of_models(connection: Connection, models: Collection[str]) -> Counter[str]:
    """Counts dispatched and running attempts by the model of their task, for these models."""
    rows = sql(
        connection,
        "SELECT t.model, count(*) AS live FROM attempts a JOIN tasks t ON t.id = a.task_id"
        " WHERE a.state IN ('dispatched', 'running') AND t.model = ANY(CAST(:models AS text[])) GROUP BY 1",
        {"models": list(models)},
    )
    return Counter({row.model: row.live for row in rows})


LEAST_TASKS = 3
"""Number of different failed tasks: a single task that fails repeatedly is no evidence about its pool."""

# Failures are few and have their own index; other ends are only counted in classes with enough failures.
_FAILING = text("""
WITH faults AS (
    SELECT resource_class, task_id, instance_id FROM attempts
    WHERE mode = 'persistent' AND end_reason IN ('infrastructure', 'environment_error', 'lost')
        AND gradings = 0 -- else it is a grader that failed
        AND resource_class = ANY(CAST(:classes AS text[]))
        AND finished_at > clock_timestamp() - make_interval(secs => :s)
), suspects AS (
    SELECT resource_class, count(*) AS faults FROM faults GROUP BY 1 HAVING count(DISTINCT task_id) >= :least
), pool AS (
    SELECT id, resource_class FROM instances WHERE state NOT IN ('terminated', 'failed') AND mode = 'persistent'
        AND resource_class IN (SELECT resource_class FROM suspects)
    UNION SELECT instance_id, resource_class FROM faults WHERE instance_id IS NOT NULL
)
SELECT s.resource_class FROM suspects s WHERE 2 * s.faults > (
    SELECT count(*) FROM pool p JOIN attempts a ON a.instance_id = p.id
    WHERE p.resource_class = s.resource_class AND a.finished_at > clock_timestamp() - make_interval(secs => :s))
""")


def failing_pools(connection: Connection, resource_classes: Collection[str], within_s: float) -> frozenset[str]:
    """Returns those classes in whose pool most attempts failed in the last seconds, of at least `LEAST_TASKS` tasks."""
    values = {"classes": list(resource_classes), "s": within_s, "least": LEAST_TASKS}
    return frozenset(connection.execute(_FAILING, values).scalars())


_HOST_LIMIT = "host-pressure:"
MODEL_LIMIT = "model-full:"


def host_limit(resource_class: str) -> str:
    """Returns the name of the limit for pressure on the hosts of a persistent pool."""
    return f"{_HOST_LIMIT}{queue_of(Mode.PERSISTENT, resource_class)}"


def failing_limit(resource_class: str) -> str:
    """Returns the name of the limit that keeps tasks of mode `auto` out of a failing pool."""
    return f"pool-failing:{queue_of(Mode.PERSISTENT, resource_class)}"


def model_limit(model: str) -> str:
    """Returns the name of the limit for a model whose engines are full."""
    return f"{MODEL_LIMIT}{model}"


_WAITING = text("""
SELECT m.model, l.mode, l.resource_class, l.user_name
FROM unnest(CAST(:modes AS text[]), CAST(:classes AS text[]), CAST(:users AS text[]))
    AS l(mode, resource_class, user_name) CROSS JOIN unnest(CAST(:models AS text[])) AS m(model)
WHERE EXISTS (SELECT FROM tasks WHERE state = 'pending' AND in_line AND requested_mode = l.mode
    AND resource_class = l.resource_class AND user_name = l.user_name AND model = m.model)
""")


def waiting_for(
    connection: Connection, queues: Sequence[QueueKey], models: Collection[str]
) -> list[tuple[str, QueueKey]]:
    """Returns those queues in which a task waits that names one of these models, each with the model."""
    if not models:
        return []
    values = {
        "modes": [queue.mode.value for queue in queues],
        "classes": [queue.resource_class for queue in queues],
        "users": [queue.user_name for queue in queues],
        "models": list(models),
    }
    rows = connection.execute(_WAITING, values)
    return [(row.model, QueueKey(Mode(row.mode), row.resource_class, row.user_name)) for row in rows]
