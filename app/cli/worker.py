"""Implements `megaflow worker …`: processes of a cluster, started by hand or by a container."""

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
for _command in (hosts.invite, hosts.join, hosts.leave):
    worker.command()(_command)


@worker.command()
def control() -> None:
    """Run the dispatcher, reconciler and schedules."""
    _start_without_keys()
    from app.control import worker as control_worker

    raise typer.Exit(control_worker.main())


@worker.command()
def persistent(
    slots: Annotated[int | None, typer.Option(min=1, help="Attempts at once; default: from the settings.")] = None,
    resource_class: Annotated[str, typer.Option("--class", help="Resource class of the instance.")] = "standard",
) -> None:
    """Run a standing instance that registers itself. Several form a pool."""
    _start_without_keys()
    from app.workers import instance

    _log()
    raise typer.Exit(instance.stand(InstanceMode.PERSISTENT, slots or load().persistent_slots, resource_class))


@worker.command()
def grading(
    slots: Annotated[int | None, typer.Option(min=1, help="Gradings at once; default: from the settings.")] = None,
    resource_class: Annotated[str, typer.Option("--class", help="Resource class of the tasks to grade.")] = "standard",
) -> None:
    """Run a standing grader that registers itself, in addition to those that the dispatcher starts on demand."""
    _start_without_keys()
    from app.workers import instance

    _log()
    raise typer.Exit(instance.stand(InstanceMode.GRADING, slots or load().grading_slots, resource_class))


@worker.command()
@worker.command(name="nursery", hidden=True)  # its name until 0.1
def launcher() -> None:
    """Run the launcher of the `process` provider."""
    _start_without_keys()
    from app.workers.launcher import main

    main()


@worker.command()
def migrate(json: Json = False) -> None:
    """Migrate the database to the newest revision, then exit."""
    from app.ledger import schema

    revision = schema.migrate(load().database())
    answer({"revision": revision}, "the database is at the newest revision", json=json)


def _start_without_keys() -> None:
    """Starts this process again without the keys of model providers, if it has any: only the gateway may have them."""
    clean = without_keys(os.environ, {load().model_api_key_env})
    if len(clean) < len(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], clean)  # noqa: S606  this very command


def _log() -> None:
    logs.configure(load().log_level)
