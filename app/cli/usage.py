"""`megaflow usage`: what models and environments were used for, in tokens, dollars and time."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer
from rich.text import Text

from app.cli.show import Json, as_json, console, lasted
from app.cli.tables import Table
from app.client import MegaFlow
from app.errors import UnknownName
from app.ledger import model_usage as ledger
from app.ledger import results
from app.ledger.model_usage import UsageRow
from app.models.kinds import USAGE_BY as WAYS
from app.models.kinds import UsageBy as By

_NUMBERS = ("attempts", "calls", "scripted", "turns", "prompt", "cached", "answers", "cost", "model", "waited")
_HELD = "environments"
_MOMENT = ["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S%z"]


def register(cli: typer.Typer) -> None:
    cli.command()(usage)


def usage(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Of this run alone: its id or name.")] = None,
    by: Annotated[str | None, typer.Option(help=f"{', '.join(WAYS)}; of one run by task, else by run.")] = None,
    user: Annotated[str | None, typer.Option(help="Of this user alone.")] = None,
    since: Annotated[datetime | None, typer.Option(formats=_MOMENT, help="Of what began then or later.")] = None,
    until: Annotated[datetime | None, typer.Option(formats=_MOMENT, help="Of what began before.")] = None,
    json: Json = False,
) -> None:
    """Tokens, dollars, model time and environment time; most expensive first. An unknown price is shown as unknown."""
    way = _way(by, default="run" if run is None else "task")
    with MegaFlow() as flow:
        run_id = None if run is None else results.find(flow.database, "runs", run)
        with flow.database.begin() as connection:
            found = ledger.usage(connection, way, run_id=run_id, user=user, since=_aware(since), until=_aware(until))
    if json:
        as_json(found)
        return
    table = Table(way, *_NUMBERS, _HELD, right=(*_NUMBERS, _HELD))
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
        lasted(row.model_s),
        lasted(row.waited_s),
        "" if row.environment_s is None else lasted(row.environment_s),
    ]


def _dollars(row: UsageRow) -> str:
    if not row.calls:
        return ""
    if row.cost_usd is None:
        return "unknown"
    known = f"${row.cost_usd:,.4f}" if row.cost_usd < 1 else f"${row.cost_usd:,.2f}"
    return known if not row.unpriced_calls else f"{known} + {row.unpriced_calls:,} unknown"


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
