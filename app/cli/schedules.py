"""Commands about recurring evaluations: `megaflow schedule add | list | remove`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.later import later
from app.cli.show import as_json, console
from app.cli.submission_options import SubmissionOptions, takes_options
from app.cli.tables import Table
from app.models.overrides import LimitOverrides
from app.scheduling.calendar import Misfire, check_cron

if TYPE_CHECKING:
    from app.client import MegaFlow
    from app.ledger import schedules
else:
    MegaFlow = later("app.client", "MegaFlow")
    schedules = later("app.ledger.schedules")

schedule = typer.Typer(help="Recurring evaluations, kept in PostgreSQL and started by beat.", no_args_is_help=True)


def register(cli: typer.Typer) -> None:
    cli.add_typer(schedule, name="schedule")


@schedule.command()
@takes_options
def add(
    name: Annotated[str, typer.Argument(help="A name of its own.")],
    cron: Annotated[str, typer.Argument(help="Five fields, UTC, e.g. '0 3 * * *'.")],
    dataset: Annotated[
        list[str], typer.Argument(help="As for submit; read anew at every firing, by the control worker.")
    ],
    *,
    options: SubmissionOptions,
    misfire: Annotated[
        Misfire, typer.Option(help="Missed due times: skip them, or run the latest once.")
    ] = Misfire.SKIP,
) -> None:
    """Add a schedule. Each due time fires exactly once, however many beats run."""
    due_at = check_cron(cron, datetime.now(UTC))
    submission = options.submission(dataset, name=name)
    with MegaFlow() as flow:
        # What could never run is refused now.
        tasks = flow.trial(submission, check=options.check(flow))
        # Options that were not given are left out, so that an older release can read it.
        unsaid = {"limits"} if submission.limits == LimitOverrides() else set[str]()
        unsaid |= {name for name in ("agent_args", "max_running") if not getattr(submission, name)}
        unsaid |= {"selection"} if not submission.selection.conditions() else set()
        kept = submission.model_dump(mode="json", exclude={"dataset", *unsaid})
        schedules.add(flow.database, name=name, cron=cron, dataset=submission.dataset, submission=kept, misfire=misfire)
    console.print(f"schedule {name!r}: {len(tasks)} tasks, next at {due_at:%Y-%m-%d %H:%M} UTC")


@schedule.command(name="list")
def list_(json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """List schedules with their next and last due times."""
    now = datetime.now(UTC)
    with MegaFlow() as flow:
        rows, fires = schedules.all_of(flow.database), schedules.last_fires(flow.database)
    found = [
        {
            "name": row.name,
            "cron": row.cron,
            "dataset": row.dataset,
            "agent": row.submission["agent"],
            "misfire": row.misfire,
            "next": f"{check_cron(row.cron, now):%Y-%m-%d %H:%M}",
            "last": str(fires[row.id][0]) if row.id in fires else None,
            "last_run": fires[row.id][1] if row.id in fires else None,
            "last_failure": fires[row.id][2] if row.id in fires else None,
        }
        for row in rows
    ]
    if json:
        as_json(found)
        return
    columns = ("name", "cron", "dataset", "agent", "misfire", "next", "last", "last_run", "last_failure")
    table = Table(*columns)
    for line in found:
        table.add_row(*(str(line[column] or "-") for column in columns))
    console.print(table)


@schedule.command()
def remove(name: Annotated[str, typer.Argument()]) -> None:
    """Remove a schedule. Its runs stay."""
    with MegaFlow() as flow:
        schedules.remove(flow.database, name)
    console.print(f"schedule {name!r} removed")
