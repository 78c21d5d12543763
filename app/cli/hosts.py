"""`megaflow worker invite`, `join` and `leave`, and `megaflow hosts`: machines that join as hosts."""

from __future__ import annotations

import os
import re
from typing import Annotated

import typer

from app.cli.show import Json, answer, console, listing, say
from app.errors import OptionInvalid

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def invite(
    name: Annotated[str, typer.Option(help="Name of the host; default: the name that it gives itself.")] = "",
    expires: Annotated[str, typer.Option(help="Time for which the token is valid: 1h, 30m, 7d.")] = "1h",
    json: Json = False,
) -> None:
    """Make a token with which one machine can join once as a host, and print the command to run there."""
    from app.client import MegaFlow
    from app.instances import joining
    from app.ledger import hosts as registry

    with MegaFlow() as flow:
        joining.check(flow.settings)
        token = registry.invite(flow.database, name=name, expires_s=_seconds(expires))
        url = flow.settings.web_base()
    answer({"token": token, "url": url}, f"megaflow worker join {url} --token {token}", json=json)


def _seconds(said: str) -> float:
    match = re.fullmatch(r"(\d{1,9})([smhd])", said.strip())
    if match is None:
        raise OptionInvalid(f"expected a time such as 30m, 1h or 7d, found {said!r}")
    return float(match[1]) * _UNITS_S[match[2]]


def join(
    url: Annotated[str, typer.Argument(help="The installation's web server: https://HOST.")],
    token: Annotated[
        str, typer.Option(envvar="MEGAFLOW_JOIN", help="Token printed by `megaflow worker invite` there.")
    ],
    slots: Annotated[
        int | None, typer.Option(min=1, help="Attempts at once; default: the installation's setting.")
    ] = None,
    resource_class: Annotated[str, typer.Option("--class", help="Resource class of its tasks.")] = "standard",
    plain_http: Annotated[
        bool, typer.Option("--plain-http", help="Allow http to another machine: the network can read the credentials.")
    ] = False,
    start: Annotated[bool, typer.Option(help="Start a pool and a grader; else `megaflow up` does.")] = True,
    install: Annotated[bool, typer.Option(help="Install Docker Engine when it is missing.")] = True,
    instance: Annotated[
        str, typer.Option(metavar="JSON", help="Run only this instance until it ends; for machines of a cloud.")
    ] = "",
    json: Json = False,
) -> None:
    """Join this machine as a host of another installation: a pool and a grader, with accounts of their own."""
    from app.cli import membership
    from app.settings import PREFIX, load
    from app.stack import lifecycle

    os.environ.pop("MEGAFLOW_JOIN", None)  # not a setting, and child processes must not have it
    chosen = {f"{PREFIX}HOST_CLASS": resource_class}
    if slots is not None:
        chosen[f"{PREFIX}PERSISTENT_SLOTS"] = str(slots)
    host = membership.join(load(), url, token, chosen, plain=plain_http)
    if instance:
        from app.workers.instance import main

        raise typer.Exit(main(instance, alone=True))
    ready = False
    if start:
        say(f"joined as {host.name}; starting. After a restart of this machine: `megaflow up`")
        lifecycle.up(load(), say, may_install=install)
        ready = membership.wait_until_ready(load(), host.name, timeout_s=load().boot_timeout_s)
    answer({"host": host.name, "ready": ready}, f"{host.name} {'takes tasks' if ready else 'has joined'}", json=json)
    if start and not ready:
        say(f"the pool is not ready within {load().boot_timeout_s:.0f} s; its log: {load().home}/logs/pool.log")
        raise typer.Exit(75)


def leave(
    name: Annotated[str, typer.Argument(help="At the installation: the host to remove; default: this machine.")] = "",
    wait: Annotated[float, typer.Option(min=0, help="Seconds that running attempts may take to end.")] = 600.0,
    json: Json = False,
) -> None:
    """Drain a host, stop its programs, and revoke its accounts: this machine, or at the installation a named host.

    The keys that cannot be revoked are printed: those of the store and of registries are the same for all hosts.
    """
    from app.cli import membership
    from app.settings import load
    from app.stack import lifecycle

    if name:
        keys = _remove(name, wait)
    else:
        name, keys = membership.leave(load(), say, wait_s=wait, stop=lambda: lifecycle.down(load(), say))
    answer({"host": name, "not_revoked": keys}, f"{name} has left", json=json)
    if keys:
        say(f"not revoked, since all hosts have the same: {', '.join(keys)}; if {name} is not trusted, change them")


def _remove(name: str, wait_s: float) -> list[str]:
    from app.cli import membership
    from app.client import MegaFlow
    from app.instances import joining
    from app.ledger import hosts as registry

    with MegaFlow() as flow:
        host = registry.by_name(flow.database, name)
        if wait_s:  # 0 removes an untrusted host at once, even with attempts in the ledger
            membership.drain(flow.settings, flow.database, name, say, wait_s=wait_s)
        joining.revoke(flow.settings, flow.database, host, "an administrator removed its host")
        return joining.keys_of_all(flow.settings.variables(), flow.settings.join_settings)


_COLUMNS = {
    "host": lambda one: one.name,
    "joined": lambda one: f"{one.joined_at:%Y-%m-%d %H:%M}" if one.joined_at else "-",
    "seen": lambda one: f"{one.seen_at:%Y-%m-%d %H:%M:%S}" if one.seen_at else "never",
    "instances": lambda one: str(one.instances),
    "slots": lambda one: str(one.slots),
    "running": lambda one: str(one.running),
}


def hosts(json: Json = False) -> None:
    """List hosts: when each joined and was last seen, its instances and running attempts."""
    from app.client import MegaFlow
    from app.ledger import hosts as registry

    with MegaFlow() as flow:
        rows = registry.in_use(flow.database)
    listing(rows, _COLUMNS, json=json, right=("instances", "slots", "running"), empty="no hosts")
    if not json and not any(one.joined_at for one in rows):
        console.print("`megaflow worker invite` lets a machine join")
