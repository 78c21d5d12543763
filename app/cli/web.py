"""`megaflow web` and `megaflow users`: the way to the pages, and who may use them."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cli.show import Json, answer, console, listing, say
from app.client import MegaFlow
from app.installation import record_command
from app.ledger import users
from app.ledger.users import OWNER, Scope, UserToken

tokens = typer.Typer(help="Users of the web server: their tokens and scopes.", no_args_is_help=True)


def register(cli: typer.Typer) -> None:
    for command in (web, mcp):
        cli.command()(command)
    cli.add_typer(tokens, name="users")


def web(json: Json = False) -> None:
    """Print where the web server is, with a link that signs you in once, as its owner."""
    with MegaFlow() as flow:
        link = f"{flow.settings.web_base()}/sign-in?once={users.owner_link(flow.database)}"
    minutes = round(users.LINK_S / 60)
    answer({"link": link, "lapses_s": users.LINK_S}, link, json=json)
    if not json:
        say(f"the link signs the user {OWNER!r} in once, within {minutes} minutes; it gives all rights")


def mcp(
    content: Annotated[
        bool, typer.Option("--content", help="Also what tasks and agents wrote: it may try to instruct the assistant.")
    ] = False,
) -> None:
    """Answer an assistant by the Model Context Protocol on standard input and output. It reads, and changes nothing."""
    from app.web.mcp import client_of, remote_client, server

    with MegaFlow() as flow:
        settings = flow.settings
        if settings.server is not None:
            token = settings.token.get_secret_value() if settings.token is not None else ""
            client = remote_client(settings.server, token)
        else:
            client = client_of(settings, flow.database)
        server(client, content=content).run("stdio")


@tokens.command()
def add(
    name: Annotated[str, typer.Argument(help="The user; new with the first token.")],
    scope: Annotated[Scope, typer.Option(help="The highest right; each contains those before it.")] = Scope.SUBMIT,
    days: Annotated[float | None, typer.Option(min=0.0001, help="Days until it lapses; default: it does not.")] = None,
    label: Annotated[str, typer.Option(help="What it is for.")] = "",
    json: Json = False,
) -> None:
    """Make a token for a user. It is shown once: only its digest is kept."""
    with MegaFlow() as flow:
        expires = None if days is None else days * 86400
        secret, token = users.add_token(flow.database, name, scope, expires_s=expires, label=label)
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
    "label": lambda one: one.label if one.kind is users.TokenKind.TOKEN else "",
    "made": lambda one: f"{one.created_at:%Y-%m-%d %H:%M}",
    "lapses": lambda one: f"{one.expires_at:%Y-%m-%d %H:%M}" if one.expires_at else "never",
    "used": lambda one: f"{one.used_at:%Y-%m-%d %H:%M}" if one.used_at else "never",
}


@tokens.command(name="list")
def list_(json: Json = False) -> None:
    """List tokens and browsers' sessions that are valid, without their secrets."""
    with MegaFlow() as flow:
        found: list[UserToken] = users.all_tokens(flow.database)
    listing(found, _COLUMNS, json=json, empty="no tokens; `megaflow users add NAME` makes one")


@tokens.command()
def revoke(
    name: Annotated[str, typer.Argument(help="The user.")],
    token: Annotated[str, typer.Option(help="The end of one token's id; default: all of the user's.")] = "",
    json: Json = False,
) -> None:
    """Revoke a user's tokens and sessions: they work for five seconds more at most."""
    with MegaFlow() as flow:
        count = users.revoke(flow.database, name, token)
        record_command(flow.database, "user.revoked", name)
    answer({"revoked": count}, f"{count} tokens and sessions of {name} revoked", json=json)
    if not json and name == OWNER:
        console.print("`megaflow web` signs the owner in again")
