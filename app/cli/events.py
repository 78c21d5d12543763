"""Commands about the event stream: `megaflow events`, and `megaflow webhooks add | list | remove`."""

from __future__ import annotations

import json as json_lines
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import takewhile
from typing import Annotated

import typer

from app.cli.orderly import interrupt_sets
from app.cli.show import Json, answer, clock, listing, say
from app.client import MegaFlow
from app.ledger import webhooks as kept
from app.ledger.stream import StreamedEvent
from app.ledger.webhooks import Hook

webhooks = typer.Typer(help="Webhooks: URLs that receive events as they happen.", no_args_is_help=True)

Kinds = Annotated[
    list[str] | None,
    typer.Option(
        "--kind",
        help="Only this kind, e.g. attempt.claimed, or a prefix with its dot, e.g. `attempt.`; may be repeated.",
    ),
]


def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Also print new events, until interrupted.")] = False,
    begin: Annotated[
        str | None,
        typer.Option("--from", help="Begin after this position, or at `start` or `now`. Default: start; with -f: now."),
    ] = None,
    run: Annotated[str | None, typer.Option(help="Only this run: its id, the id's end, or its name.")] = None,
    task: Annotated[str | None, typer.Option(help="Only this task: its id or the id's end.")] = None,
    kind: Kinds = None,
) -> None:
    """Print events, one JSON object per line. Each has its position: pass it to `--from` to go on after it."""
    stop = threading.Event()
    with MegaFlow() as flow, suppress(KeyboardInterrupt), interrupt_sets(stop):
        stream = flow.events(
            begin or ("now" if follow else "start"),
            follow=follow,
            kinds=kind or (),
            run_id=None if run is None else flow.installation.find_run(run),
            task_id=None if task is None else flow.installation.find_task(task),
            stop=stop,
            outage=lambda error: say(f"{error}; waiting for it"),
        )
        _print(takewhile(lambda _: not stop.is_set(), stream))


def _print(found: Iterator[StreamedEvent]) -> None:
    """Prints each event at once, as a whole line. A pipe that the reader closed is no error."""
    try:
        for streamed in found:
            sys.stdout.write(json_lines.dumps(streamed.body()) + "\n")
            sys.stdout.flush()
    except BrokenPipeError:
        # Discards the rest of the buffer: the interpreter would report the broken pipe at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@webhooks.command()
def add(
    url: Annotated[
        str, typer.Argument(help="An http or https URL; it receives POST requests with {position, events}.")
    ],
    kind: Kinds = None,
    secret_env: Annotated[
        str | None,
        typer.Option(help="Environment variable of the control worker with the secret that signs the requests."),
    ] = None,
    begin: Annotated[str, typer.Option("--from", help="`now`, `start`, or a position.")] = "now",
    json: Json = False,
) -> None:
    """Send events to a URL: at least once, in order, up to 100 per request, repeated until it answers 2xx."""
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
    """List webhooks with their last delivery and last error."""
    with MegaFlow() as flow:
        listing(kept.all_of(flow.database), _WEBHOOK_COLUMNS, json=json)


@webhooks.command()
def remove(
    webhook: Annotated[str, typer.Argument(help="The webhook's id, or the beginning or end of it.")], json: Json = False
) -> None:
    """Stop sending events to a URL. A request that is on its way may still arrive."""
    with MegaFlow() as flow:
        hook = kept.remove(flow.database, webhook)
    answer(hook, f"webhook {hook.id} removed", json=json)
