"""Commands about the stack: up, down, doctor."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from app.cli.show import Json, answer, as_json, console, say
from app.cli.tables import Table
from app.settings import Settings, load


def up(
    install: Annotated[
        bool, typer.Option(help="Install Docker Engine from Debian's packages when it is missing.")
    ] = True,
    json: Json = False,
) -> None:
    """Start everything on this machine: servers, workers, beat, Flower. Safe to repeat."""
    from app.stack import lifecycle

    started = lifecycle.up(load(), say, may_install=install)
    shown = {name: one for name, one in asdict(started).items() if name != "engine"}
    answer(shown, f"up in {started.took_s:.1f} s: {', '.join(started.programs)}", json=json)
    if started.restart_needed:
        say("the running stack has other settings than these; `megaflow down && megaflow up` to change them")
    if not load().joined and not json:
        where_the_pages_are(load())


def where_the_pages_are(settings: Settings, path: str = "/") -> None:
    """Prints the web server's address with a link that signs the owner in once, and the address of Flower."""
    from app.ledger import users
    from app.ledger.database import Database
    from app.stack import flower

    database = Database(settings.database(), pooled=False)
    link = users.owner_link(database)
    # `path` last: a terminal that cuts the line does not cut the secret.
    console.print(f"pages: {settings.web_base()}/sign-in?once={link}&next={path}", soft_wrap=True)

    where = flower.password_file(settings)
    password = f"password in {where}" if where is not None else "password from the settings"
    console.print(f"Flower: {flower.url(settings)} (user {settings.flower_user}, {password})", soft_wrap=True)


def down(
    purge: Annotated[
        bool, typer.Option("--purge", help="Delete the data too; installed tools (`tools`) stay.")
    ] = False,
    json: Json = False,
) -> None:
    """Stop everything that `up` started. No process, container, network or volume of MegaFlow is left."""
    from app.stack import lifecycle

    stopped = lifecycle.down(load(), say, purge=purge)
    engine = ", and the container engine that we had started" if stopped.engine_stopped else ""
    answer(stopped, f"down: {len(stopped.programs)} programs stopped{engine}", json=json)
    if stopped.engine_kept_for:
        say(f"the container engine keeps running for {stopped.engine_kept_for} containers of others")


def doctor(json: Json = False) -> None:
    """Check everything that a task needs, and print the fix for what is missing. Changes nothing."""
    from app.stack import doctor as surgery

    checks = surgery.checks(load())
    if json:
        as_json(checks)
    else:
        table = Table("", "check", "found", "fix", keys=4)
        colours = {"ok": "green", "warn": "yellow", "fail": "red"}
        for check in checks:
            table.add_row(Text(check.level, style=colours[check.level]), check.name, check.found, check.fix)
        console.print(table)
    if any(check.level == "fail" for check in checks):
        raise typer.Exit(1)
