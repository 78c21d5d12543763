"""Implements `megaflow web`, `mcp` and `users`: sign-in links, assistants, and users' tokens."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cli.show import Json, answer, console, listing, say
from app.client import MegaFlow
from app.installation import record_command
from app.ledger import users as ledger
from app.ledger.users import OWNER, Scope, UserToken

users = typer.Typer(help="Users of the web server: their tokens and scopes.", no_args_is_help=True)


def web(json: Json = False) -> None:
    """Print the web server's address, with a link that signs you in once as its owner."""
    with MegaFlow() as flow:
        link = f"{flow.settings.web_base()}/sign-in?once={ledger.owner_link(flow.database)}"
    minutes = round(ledger.LINK_S / 60)
    answer({"link": link, "lapses_s": ledger.LINK_S}, link, json=json)
    if not json:
        say(f"the link signs the user {OWNER!r} in once, within {minutes} minutes; it gives all rights")


def mcp(
    content: Annotated[
        bool,
        typer.Option("--content", help="Include what tasks and agents wrote: it may try to instruct the assistant."),
    ] = False,
) -> None:
    """Serve an assistant by the Model Context Protocol on standard input and output. Reads only, changes nothing."""
    from app.web.mcp import client_of, remote_client, server

    with MegaFlow() as flow:
        settings = flow.settings
        if settings.server is not None:
            token = settings.token.get_secret_value() if settings.token is not None else ""
            client = remote_client(settings.server, token)
        else:
            client = client_of(settings, flow.database)
        server(client, content=content).run("stdio")


@users.command()
def add(
    name: Annotated[str, typer.Argument(help="Name of the user; the first token creates the user.")],
    scope: Annotated[Scope, typer.Option(help="Highest right; each includes the lower ones.")] = Scope.SUBMIT,
    days: Annotated[float | None, typer.Option(min=0.0001, help="Days until it expires; default: never.")] = None,
    label: Annotated[str, typer.Option(help="Purpose of the token.")] = "",
    json: Json = False,
) -> None:
    """Create a token for a user. It is printed once: only its digest is stored."""
    with MegaFlow() as flow:
        expires = None if days is None else days * 86400
        secret, token = ledger.add_token(flow.database, name, scope, expires_s=expires, label=label)
        record_command(flow.database, "user.added", name, scope=scope.value)
        base = flow.settings.web_base()
    answer({"token": secret, "id": token.id, "user_name": name, "server": base}, secret, json=json)
    if not json:
        say(f"for {name}: megaflow --server {base} runs, with MEGAFLOW_TOKEN set to this token; or paste it at {base}")


_COLUMNS = {
    "user": lambda one: one.user_name,
    "scope": lambda one: one.highest.value,
    "kind": lambda one: one.kind.value,
    "id": lambda one: str(one.id)[-12:],
    "label": lambda one: one.label if one.kind is ledger.TokenKind.TOKEN else "",
    "made": lambda one: f"{one.created_at:%Y-%m-%d %H:%M}",
    "lapses": lambda one: f"{one.expires_at:%Y-%m-%d %H:%M}" if one.expires_at else "never",
    "used": lambda one: f"{one.used_at:%Y-%m-%d %H:%M}" if one.used_at else "never",
}


@users.command(name="list")
def list_(json: Json = False) -> None:
    """List tokens and browsers' sessions that are valid, without their secrets."""
    with MegaFlow() as flow:
        rows: list[UserToken] = ledger.all_tokens(flow.database)
    listing(rows, _COLUMNS, json=json, empty="no tokens; `megaflow users add NAME` makes one")


@users.command()
def revoke(
    name: Annotated[str, typer.Argument(help="Name of the user.")],
    token: Annotated[str, typer.Option(help="End of a token's id; default: all tokens of the user.")] = "",
    json: Json = False,
) -> None:
    """Revoke a user's tokens and sessions. They work for at most five more seconds."""
    with MegaFlow() as flow:
        count = ledger.revoke(flow.database, name, token)
        record_command(flow.database, "user.revoked", name)
    answer({"revoked": count}, f"{count} tokens and sessions of {name} revoked", json=json)
    if not json and name == OWNER:
        console.print("`megaflow web` signs the owner in again")
