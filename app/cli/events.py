"""Commands about the stream of facts: `megaflow events`, and `megaflow webhooks add | list | remove`."""

from __future__ import annotations

import json as json_lines
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import typer

from app.cli.show import Json, answer, clock, listing, say
from app.client import MegaFlow
from app.ledger import webhooks as kept
from app.ledger.stream import StreamedEvent
from app.ledger.webhooks import Hook

webhooks = typer.Typer(help="URLs that are told of events as they happen.", no_args_is_help=True)

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
) -> None:
    """Print what happened, one JSON object a line. Each has the position after it: `--from` that goes on there."""
    with MegaFlow() as flow, _until_interrupted() as stop:
        if follow:
            threading.Thread(target=_watch_for_a_closed_pipe, args=(stop,), daemon=True).start()
        found = flow.events(
            begin or ("now" if follow else "start"),
            follow=follow,
            kinds=kind or (),
            run_id=None if run is None else flow.installation.find_run(run),
            task_id=None if task is None else flow.installation.find_task(task),
            stop=stop,
            outage=lambda error: say(f"{error}; waiting for it"),
        )
        _print(found, stop, at_once=follow)


def _print(found: Iterator[StreamedEvent], stop: threading.Event, *, at_once: bool) -> None:
    """Whole lines only, whatever ends it. A reader that has gone away is no fault."""
    try:
        for streamed in found:
            sys.stdout.write(json_lines.dumps(streamed.body()) + "\n")
            if at_once:
                sys.stdout.flush()
            if stop.is_set():
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
    answer(hook, f"webhook {hook.id}: {', '.join(hook.kinds) or 'all events'}", json=json)
    if secret_env is not None and secret_env not in os.environ:
        say(f"{secret_env} is not set here; the control worker must have it, and sends nothing until it does")


_WEBHOOK_COLUMNS: dict[str, Callable[[Hook], str]] = {
    "webhook": lambda hook: str(hook.id),
    "url": lambda hook: hook.url,
    "kinds": lambda hook: ", ".join(hook.kinds) or "all",
    "signed with": lambda hook: hook.secret_env or "-",
    "delivered": lambda hook: clock(hook.delivered_at),
    "failures": lambda hook: str(hook.failures),
    "again in": lambda hook: f"{hook.wait_s:.0f} s" if hook.failures else "-",
    "last error": lambda hook: hook.last_error or "-",
}


@webhooks.command(name="list")
def list_(json: Json = False) -> None:
    """List webhooks, how far they are, and what went wrong last."""
    with MegaFlow() as flow:
        listing(kept.all_of(flow.database), _WEBHOOK_COLUMNS, json=json)


@webhooks.command()
def remove(
    webhook: Annotated[str, typer.Argument(help="Its id, or the beginning or end of it.")], json: Json = False
) -> None:
    """Tell a URL no more. A request that is on its way may still arrive."""
    with MegaFlow() as flow:
        hook = kept.remove(flow.database, webhook)
    answer(hook, f"webhook {hook.id} removed", json=json)
