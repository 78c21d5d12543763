"""Commands that steer what is accepted: pause, resume, drain, deadlines, and the instances that there are."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from app.cli.later import later
from app.cli.show import as_json, console, errors
from app.cli.tables import Table
from app.errors import SpecInvalid, UnknownName, WaitTimeout

if TYPE_CHECKING:
    from app.client import MegaFlow
    from app.ledger import classes as classes_
    from app.ledger import deadlines, pauses
    from app.ledger import instances as instances_
    from app.ledger import instances as live_instances
    from app.ledger.database import Database
    from app.ledger.instances import LiveInstance
    from app.ledger.pauses import Change
    from app.stopping import nudge
else:
    MegaFlow = later("app.client", "MegaFlow")
    classes_ = later("app.ledger.classes")
    deadlines = later("app.ledger.deadlines")
    live_instances = later("app.ledger.instances")
    pauses = later("app.ledger.pauses")
    instances_ = later("app.ledger.instances")
    nudge = later("app.stopping", "nudge")

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Run = Annotated[str, typer.Argument(help="A run's id, its end or its name.")]

_LOOK_S = 0.5
"""Between two looks at what drains."""


def register(cli: typer.Typer) -> None:
    for command in (pause, resume, drain, instances, deadline):
        cli.command()(command)
    cli.command(name="pauses")(list_pauses)


def pause(
    run: Run,
    reason: Annotated[str, typer.Option(help="Shown where tasks wait for it.")] = "",
    json: Json = False,
) -> None:
    """Admit nothing more of a run until it is resumed. What runs goes on."""
    with MegaFlow() as flow:
        done = pauses.pause(flow.database, run, reason)
    if json:
        as_json(asdict(done))
    elif done.changed:
        _say(f"run {done.run_id} paused; {done.waiting} task(s) wait; `megaflow resume {run}`")
    else:
        _say(f"run {done.run_id} was paused already; {done.waiting} task(s) wait; `megaflow pauses` says since when")


def resume(run: Run, json: Json = False) -> None:
    """Admit the tasks of a paused run again."""
    with MegaFlow() as flow:
        done: Change = pauses.resume(flow.database, run)
    if json:
        as_json(asdict(done))
    elif done.changed:
        _say(f"run {done.run_id} resumed; {done.waiting} task(s) wait for their turn")
    else:
        _say(f"run {done.run_id} was not paused; nothing changed")


def list_pauses(json: Json = False) -> None:
    """What is paused, since when, why, and how many tasks wait for it."""
    with MegaFlow() as flow:
        found = pauses.all_of(flow.database)
    if json:
        as_json([asdict(row) for row in found])
        return
    table = Table("run", "since", "waiting", "reason")
    for row in found:
        table.add_row(str(row.run_id), f"{row.since:%Y-%m-%d %H:%M:%S}", str(row.waiting), row.reason)
    console.print(table if found else "nothing is paused")


# --- Deadlines ------------------------------------------------------------------------------------------------------


def deadline(
    run: Run,
    when: Annotated[str, typer.Argument(help="From now (2h, 90m, 1d12h), a time (2031-05-01T08:00Z), or `never`.")],
    json: Json = False,
) -> None:
    """Set a deadline: tasks of a run that have not ended by then end as `expired`."""
    at = moment(when, datetime.now(UTC))
    with MegaFlow() as flow:
        done = deadlines.set_deadline(flow.database, run, at)
    if json:
        as_json(asdict(done))
    else:
        until = "has no deadline any more" if at is None else f"ends by {at:%Y-%m-%d %H:%M:%S} UTC"
        _say(f"run {done.run_id} {until}; {done.tasks} task(s) concerned")


_DURATION = re.compile(r"(?:(?P<days>\d+)d)?(?:(?P<hours>\d+)h)?(?:(?P<minutes>\d+)m)?(?:(?P<seconds>\d+)s)?")


def moment(said: str, now: datetime) -> datetime | None:
    """`2h` after `now`, or the ISO time that was said; None for `never`.

    Raises: SpecInvalid.
    """
    said = said.strip()
    if said == "never":
        return None
    parts = _DURATION.fullmatch(said)
    try:
        if said and parts:
            return now + timedelta(**{unit: int(count) for unit, count in parts.groupdict(default="0").items()})
        at = datetime.fromisoformat(said)
        return at.astimezone(UTC) if at.tzinfo else at
    except (ValueError, OverflowError):
        raise SpecInvalid(
            f"expected a duration such as 2h, 90m or 1d12h, or a time such as 2031-05-01T08:00Z, found {said!r}"
        ) from None


# --- Instances ------------------------------------------------------------------------------------------------------


def instances(json: Json = False) -> None:
    """Instances that have not ended."""
    with MegaFlow() as flow:
        found = live_instances.live(flow.database)
    if json:
        as_json([asdict(row) for row in found])
        return
    table = Table()
    for column in ("instance", "mode", "class", "provider", "state"):
        table.add_column(column)
    for column in ("slots used", "age", "last seen"):
        table.add_column(column, justify="right")
    table.add_column("draining because")
    for row in found:
        table.add_row(*_cells(row))
    console.print(table if found else "no live instances")


def _cells(row: LiveInstance) -> Sequence[str]:
    return (
        str(row.id)[-12:],
        row.mode,
        row.resource_class,
        f"{row.provider} {(row.handle or '-')[:12]}",
        row.state,
        f"{row.used} of {row.slots}",
        _age(row.age_s),
        "-" if row.silent_s is None else f"{_age(row.silent_s)} ago",
        row.draining_why or "",
    )


def _age(seconds: float) -> str:
    """`42s`, `3m05s`, `2h14m`, `3d02h`: two units at most."""
    whole = max(0, int(seconds))
    for size, unit, next_size, next_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // next_size:02d}{next_unit}"
    return f"{whole}s"


def drain(
    instance: Annotated[list[str] | None, typer.Argument(help="An instance's id, its end, or its handle.")] = None,
    resource_class: Annotated[str | None, typer.Option("--class", help="All live instances of this class.")] = None,
    why: Annotated[str, typer.Option(help="Kept with the instance.")] = "drained by hand",
    wait: Annotated[bool, typer.Option("--wait", help="Until they are gone.")] = False,
    timeout: Annotated[float | None, typer.Option(help="Seconds to wait at most.")] = None,
    json: Json = False,
) -> None:
    """Let instances finish what they have, take nothing new, and leave. The pool's minimum is filled up again."""
    if bool(instance) == bool(resource_class):
        raise typer.BadParameter("expected instances, or --class and a class's name")
    with MegaFlow() as flow:
        ids = (
            _of_class(flow, resource_class)
            if resource_class
            else [live_instances.find(flow.database, i) for i in instance or ()]
        )
        nudge(flow.settings, instances_.drain(flow.database, ids, why))
        if wait:
            _until_gone(flow.database, ids, timeout)
        left = live_instances.live(flow.database, ids)
    if json:
        as_json({"asked": ids, "gone": len(ids) - len(left), "live": [asdict(row) for row in left]})
    else:
        busy = sum(row.used for row in left)
        _say(f"{len(ids)} instance(s) told to drain: {len(ids) - len(left)} gone, {busy} attempt(s) run on the rest")


def _of_class(flow: MegaFlow, name: str) -> list[UUID]:
    with flow.database.begin() as connection:
        known = classes_.load(connection, flow.settings)
    if name not in known:
        raise UnknownName.of("resource class", name, list(known))
    return [row.id for row in live_instances.live(flow.database) if row.resource_class == name]


def _until_gone(database: Database, ids: Sequence[UUID], timeout: float | None) -> None:
    """Raises: WaitTimeout."""
    until = None if timeout is None else time.monotonic() + timeout
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as progress:
        line = progress.add_task("instances gone", total=len(ids))
        while left := live_instances.live(database, ids):
            busy = sum(row.used for row in left)
            progress.update(line, completed=len(ids) - len(left), description=f"instances gone ({busy} attempts left)")
            if until is not None and time.monotonic() >= until:
                raise WaitTimeout(f"{len(left)} instance(s) had not left after {timeout} s; they go on draining")
            time.sleep(_LOOK_S)


def _say(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
