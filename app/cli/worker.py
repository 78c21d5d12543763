"""`megaflow worker …`: the processes of a cluster, started by hand or by a container."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from app import logs
from app.cli import hosts
from app.cli.show import Json, answer
from app.models.instance import InstanceMode
from app.models.provider_keys import without_keys
from app.settings import load

worker = typer.Typer(help="Run one of the system's processes in the foreground.", no_args_is_help=True)


def register(cli: typer.Typer) -> None:
    for command in (hosts.invite, hosts.join, hosts.leave):
        worker.command()(command)
    cli.add_typer(worker, name="worker")


@worker.command()
def control() -> None:
    """Dispatcher, reconciler and schedules."""
    _start_without_keys()
    from app.control import worker as control_worker

    raise typer.Exit(control_worker.main())


@worker.command()
def persistent(
    slots: Annotated[int | None, typer.Option(min=1, help="Attempts at once; default: settings.")] = None,
    resource_class: Annotated[str, typer.Option("--class", help="Its resource class.")] = "standard",
) -> None:
    """A standing instance that registers itself; several make a pool."""
    _start_without_keys()
    from app.workers import instance

    _log()
    raise typer.Exit(instance.stand(InstanceMode.PERSISTENT, slots or load().persistent_slots, resource_class))


@worker.command()
def grading(
    slots: Annotated[int | None, typer.Option(min=1, help="Gradings at once; default: settings.")] = None,
    resource_class: Annotated[str, typer.Option("--class", help="Of which resource class's tasks.")] = "standard",
) -> None:
    """A standing grader that registers itself, beside those that the dispatcher starts when they are needed."""
    _start_without_keys()
    from app.workers import instance

    _log()
    raise typer.Exit(instance.stand(InstanceMode.GRADING, slots or load().grading_slots, resource_class))


@worker.command()
@worker.command(name="nursery", hidden=True)  # its name until 0.1
def launcher() -> None:
    """The launcher of the `process` provider."""
    _start_without_keys()
    from app.workers.launcher import main

    main()


@worker.command()
def migrate(json: Json = False) -> None:
    """Bring the database to the newest revision, then leave."""
    from app.ledger import schema

    revision = schema.migrate(load().database())
    answer({"revision": revision}, "the database is at the newest revision", json=json)


def _start_without_keys() -> None:
    """Start this process anew where its environment has keys of model providers: only the gateway may have them."""
    clean = without_keys(os.environ, {load().model_api_key_env})
    if len(clean) < len(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], clean)  # noqa: S606  this very command


def _log() -> None:
    logs.configure(load().log_level)
