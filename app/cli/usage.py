"""`megaflow usage`: what models and environments were used for, in tokens, dollars and time."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from app.cli.later import later
from app.cli.show import as_json, console
from app.cli.tables import Table
from app.errors import UnknownName
from app.models.kinds import USAGE_BY as WAYS
from app.models.kinds import UsageBy as By

if TYPE_CHECKING:
    from app.client import MegaFlow
    from app.ledger import model_usage as ledger
    from app.ledger import results
    from app.ledger.model_usage import UsageRow
else:
    MegaFlow = later("app.client", "MegaFlow")
    ledger = later("app.ledger.model_usage")
    results = later("app.ledger.results")
    UsageRow = later("app.ledger.model_usage", "UsageRow")

_MOMENT = ["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S%z"]


def register(cli: typer.Typer) -> None:
    cli.command()(usage)


def usage(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Of this run alone: its id or name.")] = None,
    by: Annotated[str | None, typer.Option(help=f"{', '.join(WAYS)}; of one run by task, else by run.")] = None,
    user: Annotated[str | None, typer.Option(help="Of this user alone.")] = None,
    since: Annotated[datetime | None, typer.Option(formats=_MOMENT, help="Of what began then or later.")] = None,
    until: Annotated[datetime | None, typer.Option(formats=_MOMENT, help="Of what began before.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Tokens, dollars, model time and environment time; most expensive first. An unknown price is shown as unknown."""
    way = _way(by, default="run" if run is None else "task")
    with MegaFlow() as flow:
        run_id = None if run is None else results.find(flow.database, "runs", run)
        with flow.database.begin() as connection:
            found = ledger.usage(connection, way, run_id=run_id, user=user, since=_aware(since), until=_aware(until))
    if json:
        as_json([asdict(row) for row in found])
        return
    columns = (
        way,
        "attempts",
        "calls",
        "scripted",
        "turns",
        "prompt",
        "cached",
        "answers",
        "cost",
        "model",
        "waited",
        "environments",
    )
    table = Table()
    for name in columns:
        table.add_column(name, justify="left" if name == way else "right")
    for row in found:
        table.add_row(*_cells(row))
    if len(found) > 1:
        table.add_row(*(Text(cell, style="bold") for cell in _cells(_sum(found))))
    console.print(table)


def _way(said: str | None, *, default: By) -> By:
    """Raises: UnknownName."""
    for way in WAYS:
        if way == (said or default):
            return way
    raise UnknownName.of("way to add up usage", str(said), list(WAYS))


def _aware(moment: datetime | None) -> datetime | None:
    """A day without a zone is the installation's own."""
    return moment if moment is None or moment.tzinfo else moment.astimezone()


def _cells(row: UsageRow) -> list[str]:
    return [
        row.key,
        "" if row.attempts is None else f"{row.attempts:,}",
        f"{row.calls:,}",
        f"{row.scripted_calls:,}",
        f"{row.turns:,}",
        f"{row.prompt_tokens:,}",
        f"{row.cached_tokens:,}",
        f"{row.completion_tokens:,}",
        _dollars(row),
        _time(row.model_s),
        _time(row.waited_s),
        "" if row.environment_s is None else _time(row.environment_s),
    ]


def _dollars(row: UsageRow) -> str:
    if not row.calls:
        return ""
    if row.cost_usd is None:
        return "unknown"
    known = f"${row.cost_usd:,.4f}" if row.cost_usd < 1 else f"${row.cost_usd:,.2f}"
    return known if not row.unpriced_calls else f"{known} + {row.unpriced_calls:,} unknown"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _sum(rows: list[UsageRow]) -> UsageRow:
    priced = [row.cost_usd for row in rows if row.cost_usd is not None and row.calls]
    attempts = [row.attempts for row in rows if row.attempts is not None]
    held = [row.environment_s for row in rows if row.environment_s is not None]
    return UsageRow(
        key="all",
        attempts=sum(attempts) if attempts else None,
        calls=sum(row.calls for row in rows),
        scripted_calls=sum(row.scripted_calls for row in rows),
        turns=sum(row.turns for row in rows),
        prompt_tokens=sum(row.prompt_tokens for row in rows),
        completion_tokens=sum(row.completion_tokens for row in rows),
        cached_tokens=sum(row.cached_tokens for row in rows),
        cost_usd=sum(priced) if priced else None,
        unpriced_calls=sum(row.unpriced_calls for row in rows),
        model_s=sum(row.model_s for row in rows),
        waited_s=sum(row.waited_s for row in rows),
        environment_s=sum(held) if held else None,
    )
