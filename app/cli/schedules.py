"""Commands about recurring evaluations: `megaflow schedule add | list | remove`."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any

import typer

from app.cli.limits import Why
from app.cli.show import Json, answer, listing
from app.cli.submission_options import SubmissionOptions, takes_options
from app.client import MegaFlow
from app.scheduling.calendar import Misfire, check_cron

schedule = typer.Typer(help="Recurring evaluations, stored in PostgreSQL and started by beat.", no_args_is_help=True)


@schedule.command()
@takes_options
def add(
    name: Annotated[str, typer.Argument(help="Unique name of the schedule.")],
    cron: Annotated[str, typer.Argument(help="Five fields, UTC, e.g. '0 3 * * *'.")],
    dataset: Annotated[
        list[str], typer.Argument(help="As for `submit`; the control worker reads it again at every due time.")
    ],
    *,
    options: SubmissionOptions,
    misfire: Annotated[
        Misfire, typer.Option(help="Missed due times: skip them, or run the latest once.")
    ] = Misfire.SKIP,
    reason: Why = "",
    json: Json = False,
) -> None:
    """Add a schedule. Each due time fires exactly once, however many beats run."""
    due_at = check_cron(cron, datetime.now(UTC))
    submission = options.submission(dataset, name=name)
    with MegaFlow() as flow:
        # Refuse now what could never run.
        tasks = flow.schedule(name, cron, submission, misfire.value, options.check(flow), reason)
    text = f"schedule {name!r}: {tasks} tasks, next at {due_at:%Y-%m-%d %H:%M} UTC"
    answer({"name": name, "cron": cron, "tasks": tasks, "next": f"{due_at:%Y-%m-%d %H:%M}"}, text, json=json)


_COLUMNS = ("name", "cron", "next", "dataset", "agent", "last_run", "last", "last_failure", "misfire")


@schedule.command(name="list")
def list_(json: Json = False) -> None:
    """List schedules with their next and last due times."""
    now = datetime.now(UTC)
    with MegaFlow() as flow:
        rows = flow.installation.schedules()
    lines: list[dict[str, Any]] = []
    for row in rows:
        upcoming, last = f"{check_cron(row.cron, now):%Y-%m-%d %H:%M}", row.last_due_at and str(row.last_due_at)
        values = (row.name, row.cron, upcoming, row.dataset, row.submission["agent"], row.last_run, last)
        lines.append(dict(zip(_COLUMNS, (*values, row.last_failure, row.misfire), strict=True)))
    listing(lines, {name: partial(_cell, name) for name in _COLUMNS}, json=json)


def _cell(column: str, line: dict[str, Any]) -> str:
    return str(line[column] or "-")


@schedule.command()
def remove(name: Annotated[str, typer.Argument()], reason: Why = "", json: Json = False) -> None:
    """Remove a schedule. Its runs stay."""
    with MegaFlow() as flow:
        flow.installation.remove_schedule(name, reason)
    answer({"name": name}, f"schedule {name!r} removed", json=json)
