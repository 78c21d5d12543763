"""Commands that measure: `megaflow environments` (how long each phase took) and `megaflow metrics` (for Prometheus)."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.later import later
from app.cli.show import as_json, console
from app.cli.tables import Table
from app.errors import UnknownName

if TYPE_CHECKING:
    from app.client import MegaFlow
    from app.ledger import environment_times, results
    from app.ledger.environment_times import PhaseTimes
else:
    MegaFlow = later("app.client", "MegaFlow")
    environment_times = later("app.ledger.environment_times")
    results = later("app.ledger.results")

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def register(cli: typer.Typer) -> None:
    for command in (environments, metrics):
        cli.command()(command)


def environments(
    run: Annotated[str | None, typer.Argument(help="Only this run: its id, the id's end, or its name.")] = None,
    since: Annotated[str | None, typer.Option(help="Only attempts of this last time, e.g. 90s, 15m, 2h, 7d.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """How long environments took, phase by phase: p50 / p95 / p99 by kind and path, in milliseconds."""
    begin = None if since is None else datetime.now(UTC) - _span(since)
    with MegaFlow() as flow:
        run_id = None if run is None else results.find(flow.database, "runs", run)
        found = environment_times.table(flow.database, run_id=run_id, since=begin)
    if json:
        as_json([asdict(one) for one in found])
    elif not found:
        console.print("no attempt of these has recorded an environment yet", highlight=False)
    else:
        console.print(_table(found))


def metrics() -> None:
    """Print all metrics in Prometheus' text format, as the control worker serves them at MEGAFLOW_METRICS_PORT."""
    from app.control.metrics import exposition

    with MegaFlow() as flow:
        sys.stdout.write(exposition(flow.settings, flow.database))


def _table(found: list[PhaseTimes]) -> Table:
    """A row per kind and path; a column per phase that any of them has. The count is of environments."""
    rows: dict[tuple[str, str], dict[str, PhaseTimes]] = defaultdict(dict)
    for one in found:
        rows[one.kind, one.path][one.phase] = one
    shown = [phase for phase in environment_times.PHASES if any(phase in phases for phases in rows.values())]
    table = Table("kind", "path", "count", *shown)
    for (kind, path), phases in rows.items():
        count = max(one.count for one in phases.values())
        table.add_row(kind, path, str(count), *(_spread(phases.get(phase)) for phase in shown))
    return table


def _spread(one: PhaseTimes | None) -> str:
    return "-" if one is None else " / ".join(_milliseconds(value) for value in (one.p50_s, one.p95_s, one.p99_s))


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f}" if seconds < 0.1 else f"{seconds * 1000:.0f}"


def _span(said: str) -> timedelta:
    """Raises: UnknownName."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", said)
    if found is None:
        raise UnknownName(f"expected a span such as 90s, 15m, 2h or 7d, found {said!r}")
    return timedelta(seconds=float(found[1]) * _UNITS_S[found[2]])
