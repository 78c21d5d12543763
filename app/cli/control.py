"""Commands that steer accepted work: pause, resume, budgets, and draining instances."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated
from uuid import UUID

import typer

from app.cli.show import Json, answer, listing, say
from app.client import MegaFlow
from app.errors import LimitInvalid, WaitTimeout
from app.ledger import instances as ledger
from app.ledger import pauses
from app.ledger.database import Database
from app.ledger.instances import LiveInstance
from app.stopping import nudge
from app.texts import lasted, short_id

Run = Annotated[str, typer.Argument(help="A run's id, the end of its id, or its name.")]

_LOOK_S = 0.5
"""Seconds between two checks of draining instances."""


def pause(
    run: Run,
    reason: Annotated[str, typer.Option(help="Shown where the run's tasks wait.")] = "",
    json: Json = False,
) -> None:
    """Admit no more tasks of a run until it is resumed. Running attempts go on."""
    with MegaFlow() as flow:
        result = flow.installation.pause(run, reason)
    text = f"run {result.run_id} paused; {result.waiting} task(s) wait; `megaflow resume {run}`"
    if not result.changed:
        text = f"run {result.run_id} was paused already; `megaflow explain {run}` says since when, and why"
    answer(result, text, json=json)


def resume(run: Run, json: Json = False) -> None:
    """Admit the tasks of a paused run again."""
    with MegaFlow() as flow:
        result = flow.installation.resume(run)
    text = f"run {result.run_id} was not paused; nothing changed"
    if result.changed:
        text = f"run {result.run_id} resumed; {result.waiting} task(s) wait for their turn"
    answer(result, text, json=json)


def budget(
    run: Annotated[str, typer.Argument(help="A run, or the end of its id.")],
    usd: Annotated[str, typer.Argument(help="US dollars for its model calls, all tasks together; `none` lifts it.")],
    json: Json = False,
) -> None:
    """Give a run another budget. A run paused because it had spent the old one goes on."""
    with MegaFlow() as flow:
        run_id, spent = pauses.set_budget(flow.database, run, _dollars(usd))
    bound = "no budget" if usd == "none" else f"a budget of ${_dollars(usd):,.2f}"
    fields = {"run_id": run_id, "budget_usd": _dollars(usd), "spent_usd": spent}
    answer(fields, f"run {short_id(run_id)}: {bound}, ${spent:,.4f} spent", json=json)


def _dollars(word: str) -> float | None:
    if word == "none":
        return None
    try:
        dollars = float(word)
    except ValueError:
        dollars = 0.0
    if not 0 < dollars < float("inf"):
        raise LimitInvalid(f"expected US dollars above 0, or `none`, found {word!r}; nothing was changed")
    return dollars


_INSTANCE_COLUMNS: dict[str, Callable[[LiveInstance], str]] = {
    "instance": lambda row: short_id(row.id),
    "mode": lambda row: row.mode,
    "class": lambda row: row.resource_class,
    "provider": lambda row: f"{row.provider} {(row.handle or '-')[:12]}",
    "host": lambda row: row.host or "-",
    "state": lambda row: row.state,
    "slots used": lambda row: f"{row.used} of {row.slots}",
    "age": lambda row: lasted(row.age_s),
    "last seen": lambda row: "-" if row.silent_s is None else f"{lasted(row.silent_s)} ago",
    "draining because": lambda row: row.draining_why or "",
}


def instances(json: Json = False) -> None:
    """List instances that have not ended."""
    with MegaFlow() as flow:
        rows = ledger.live(flow.database)
    listing(rows, _INSTANCE_COLUMNS, json=json, right=("slots used", "age", "last seen"), empty="no live instances")


def drain(
    instance: Annotated[list[str], typer.Argument(help="An instance's id, the end of its id, or its handle.")],
    wait: Annotated[bool, typer.Option("--wait", help="Wait until they are gone.")] = False,
    timeout: Annotated[float | None, typer.Option(help="Seconds to wait at most.")] = None,
    json: Json = False,
) -> None:
    """Let instances finish their attempts, take nothing new, and leave. The pool's minimum is filled up again."""
    with MegaFlow() as flow:
        ids = [ledger.find(flow.database, one) for one in instance]
        nudge(flow.settings, ledger.drain(flow.database, ids, "drained by hand"))
        if wait:
            until_gone(flow.database, ids, timeout)
        left = ledger.live(flow.database, ids)
    ended, busy = len(ids) - len(left), sum(row.used for row in left)
    text = f"{len(ids)} instance(s) told to drain: {ended} gone, {busy} attempt(s) run on the rest"
    answer({"asked": ids, "gone": ended, "live": left}, text, json=json)


def until_gone(database: Database, ids: Sequence[UUID], timeout: float | None) -> None:
    """Waits until draining instances have left; says how many have not. Raises: WaitTimeout, DatabaseUnavailable."""
    until = None if timeout is None else time.monotonic() + timeout
    previous = None
    while left := ledger.live(database, ids):
        if (now := (len(left), sum(row.used for row in left))) != previous:
            previous = now
            say(f"{now[0]} instance(s) left, with {now[1]} attempt(s)")
        if until is not None and time.monotonic() >= until:
            raise WaitTimeout(f"{len(left)} instance(s) had not left after {timeout} s; they go on draining")
        time.sleep(_LOOK_S)
