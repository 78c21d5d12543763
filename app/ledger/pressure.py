"""Records how short hosts are of CPU and memory, and how full the engines of models are: what admission goes by.

Hosts and gateways report every two seconds; what is older than `FRESH_S` counts for nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass

from sqlalchemy import Connection, text

from app.ledger.database import Database, sql

FRESH_S = 15.0
"""A report that is older says nothing any more."""


@dataclass(frozen=True, slots=True)
class HostPressure:
    """What a host reports of itself.

    cpu: share of the last seconds in which some process waited for a CPU. memory_available: share of all memory.
    """

    cores: int
    cpu: float
    memory_available: float


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How full one engine is. kv_use: share of its KV cache in use, where it says so."""

    url: str
    models: tuple[str, ...]  # as the calls of the last seconds named them
    inside: int  # calls that it has
    waiting: int  # calls that wait for it at the gateway
    queued: int  # of those that it has: in its own queue, where it says so
    refused: int  # calls that it refused as too many in the last seconds (429, 503)
    kv_use: float | None = None


def report_host(database: Database, host: str, pressure: HostPressure) -> None:
    """Keep a host's report, once it is known by its images (`host_images.report`). Raises: DatabaseUnavailable."""
    with database.begin() as connection:
        sql(
            connection,
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
    """Keep what a gateway, by a name that no other has, sees of its engines now. Raises: DatabaseUnavailable."""
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
    """The engines that gateways have reported in the last seconds; what several report of one is added up."""
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
