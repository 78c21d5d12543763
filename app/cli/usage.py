"""Implements `megaflow usage`: tokens, dollars and time used."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from app.cli.show import Json, as_json, console
from app.cli.tables import Table
from app.client import MegaFlow
from app.ledger.model_usage import UsageRow
from app.models.kinds import UsageBy
from app.texts import grading_cost, lasted

_NUMBERS = (
    *("attempts", "calls", "scripted", "turns", "prompt", "cached", "answers"),
    *("cost", "model", "waited", "environments", "grading"),
)


def usage(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Only this run: its id or name.")] = None,
    by: Annotated[UsageBy | None, typer.Option(help="What each row is; default: a task with RUN, else a run.")] = None,
    user: Annotated[str | None, typer.Option(help="Only this user.")] = None,
    json: Json = False,
) -> None:
    """Print tokens, dollars, model time and environment time; most expensive first. Unknown prices are marked.

    Answers of superseded replicas are shown as waste.
    """
    way: UsageBy = by or ("run" if run is None else "task")
    with MegaFlow() as flow:
        run_id = None if run is None else flow.installation.find_run(run)
        rows = flow.installation.usage(way, run_id=run_id, user=user)
    if json:
        as_json(rows)
        return
    wasted = any(row.waste_tokens or row.waste_usd for row in rows)
    numbers = (*_NUMBERS, "waste") if wasted else _NUMBERS
    table = Table(way, *numbers, right=numbers)
    for row in rows:
        table.add_row(*_cells(row, wasted=wasted))
    if len(rows) > 1:
        table.add_row(*(Text(cell, style="bold") for cell in _cells(_sum(rows), wasted=wasted)))
    console.print(table)


def _cells(row: UsageRow, *, wasted: bool) -> list[str]:
    dollars = f", ${row.waste_usd:,.4f}" if row.waste_usd else ""
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
        grading_cost(row.grading_s, row.grading_usd),
        *([f"{row.waste_tokens:,}{dollars}"] if wasted else []),
    ]


def _dollars(row: UsageRow) -> str:
    if not row.calls:
        return ""
    if row.cost_usd is None:
        return "unknown"
    known = f"${row.cost_usd:,.4f}" if row.cost_usd < 1 else f"${row.cost_usd:,.2f}"
    return known if not row.unpriced_calls else f"{known} + {row.unpriced_calls:,} unknown"


def _sum(rows: list[UsageRow]) -> UsageRow:
    """Returns the totals of all columns. Unknown values are left out."""
    names = [name for name in UsageRow.__dataclass_fields__ if name not in ("key", "id")]
    known = {name: [value for row in rows if (value := getattr(row, name)) is not None] for name in names}
    if not any(row.calls and row.cost_usd is not None for row in rows):
        known["cost_usd"] = []
    totals: dict[str, Any] = {name: sum(values) if values else None for name, values in known.items()}
    return UsageRow(key="all", **totals)
