"""Commands about the stream of facts: `megaflow events`, and `megaflow webhooks add | list | remove`."""

from __future__ import annotations

import json as json_lines
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from app.cli.later import later
from app.cli.show import as_json, clock, console, say
from app.cli.tables import Table

if TYPE_CHECKING:
    from app.client import MegaFlow
    from app.ledger import results, stream
    from app.ledger import webhooks as kept
    from app.ledger.database import Database
    from app.ledger.stream import EventFilter, StreamedEvent
else:
    MegaFlow = later("app.client", "MegaFlow")
    results = later("app.ledger.results")
    stream = later("app.ledger.stream")
    kept = later("app.ledger.webhooks")
    EventFilter = later("app.ledger.stream", "EventFilter")

webhooks = typer.Typer(help="URLs that are told of events as they happen.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Kinds = Annotated[
    list[str] | None,
    typer.Option(
        "--kind", help="Only this kind, e.g. attempt.claimed, or a beginning with its dot: attempt. May be repeated."
    ),
]


def register(cli: typer.Typer) -> None:
    cli.command()(events)
    cli.add_typer(webhooks, name="webhooks")


def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until interrupted.")] = False,
    begin: Annotated[
        str | None,
        typer.Option("--from", help="A position (goes on after it), `start` or `now`. Default: start; with -f: now."),
    ] = None,
    run: Annotated[str | None, typer.Option(help="Only this run: its id, the id's end, or its name.")] = None,
    task: Annotated[str | None, typer.Option(help="Only this task: its id or the id's end.")] = None,
    kind: Kinds = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The most events to print.")] = None,
) -> None:
    """Print what happened, one JSON object a line. Each has the position after it: `--from` that goes on there."""
    with MegaFlow() as flow, _until_interrupted() as stop:
        database = flow.database
        wanted = EventFilter(tuple(kind or ()), _named(database, "runs", run), _named(database, "tasks", task))
        position = stream.place(database, begin or ("now" if follow else "start"))
        if follow:
            threading.Thread(target=_watch_for_a_closed_pipe, args=(stop,), daemon=True).start()
            found = stream.follow(
                database, position, stop, wanted, limit=min(limit or stream.PAGE, stream.PAGE), outage=say_it
            )
        else:
            found = _what_there_is(database, position, wanted, limit)
        _print(found, limit, stop, at_once=follow)


def say_it(error: Exception) -> None:
    say(f"{error}; waiting for it")


def _named(database: Database, kind: str, name: str | None) -> UUID | None:
    return None if name is None else results.find(database, kind, name)


def _what_there_is(
    database: Database, position: str, wanted: EventFilter, limit: int | None
) -> Iterator[StreamedEvent]:
    size = min(limit or stream.PAGE, stream.PAGE)
    while True:
        page = stream.read(database, position, size, wanted)
        yield from page.events
        if len(page.events) < size:
            return
        position = page.position


def _print(found: Iterator[StreamedEvent], limit: int | None, stop: threading.Event, *, at_once: bool) -> None:
    """Whole lines only, whatever ends it. A reader that has gone away is no fault."""
    try:
        for number, streamed in enumerate(found, start=1):
            sys.stdout.write(json_lines.dumps(streamed.body()) + "\n")
            if at_once:
                sys.stdout.flush()
            if number == limit or stop.is_set():
                break
        sys.stdout.flush()
    except BrokenPipeError:
        # What is left in the buffer goes nowhere, without a complaint at the interpreter's end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _until_interrupted() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets, so that no line is torn; the second one interrupts."""
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, _frame: FrameType | None) -> None:
        stop.set()
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch_for_a_closed_pipe(stop: threading.Event) -> None:
    """Notice a reader that has gone away also while there is nothing to write."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        while not stop.is_set():
            if any(found & select.POLLERR for _, found in poll.poll(200)):
                stop.set()
    except (OSError, ValueError):
        return  # no file descriptor: nothing to watch


@webhooks.command()
def add(
    url: Annotated[str, typer.Argument(help="http or https; gets POST requests with {position, events}.")],
    kind: Kinds = None,
    secret_env: Annotated[
        str | None,
        typer.Option(help="Name of the variable, in the control worker's environment, that signs the requests."),
    ] = None,
    begin: Annotated[str, typer.Option("--from", help="`now`, `start`, or a position.")] = "now",
    json: Json = False,
) -> None:
    """Tell a URL of events: at least once, in order, up to 100 in a request, again until it answers 2xx."""
    with MegaFlow() as flow:
        hook = kept.add(flow.database, url, tuple(kind or ()), secret_env=secret_env, position=begin)
    if json:
        as_json(_fields(hook))
        return
    console.print(f"webhook {hook.id}: {', '.join(hook.kinds) or 'all events'}", highlight=False)
    if secret_env is not None and secret_env not in os.environ:
        say(f"{secret_env} is not set here; the control worker must have it, and sends nothing until it does")


@webhooks.command(name="list")
def list_(json: Json = False) -> None:
    """List webhooks, how far they are, and what went wrong last."""
    with MegaFlow() as flow:
        found = kept.all_of(flow.database)
    if json:
        as_json([_fields(hook) for hook in found])
        return
    table = Table()
    for column in ("webhook", "url", "kinds", "signed with", "delivered", "failures", "again in", "last error"):
        table.add_column(column)
    for hook in found:
        table.add_row(
            str(hook.id),
            hook.url,
            ", ".join(hook.kinds) or "all",
            hook.secret_env or "-",
            clock(hook.delivered_at),
            str(hook.failures),
            f"{hook.wait_s:.0f} s" if hook.failures else "-",
            hook.last_error or "-",
        )
    console.print(table)


def _fields(hook: kept.Hook) -> dict[str, object]:
    return {name: getattr(hook, name) for name in hook.__dataclass_fields__}


@webhooks.command()
def remove(webhook: Annotated[str, typer.Argument(help="Its id, or the beginning or end of it.")]) -> None:
    """Tell a URL no more. A request that is on its way may still arrive."""
    with MegaFlow() as flow:
        hook = kept.remove(flow.database, webhook)
    console.print(f"webhook {hook.id} removed", highlight=False)
