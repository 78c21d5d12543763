"""`megaflow worker invite`: machines that join as hosts."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from app.cli.show import Json, answer


def invite(
    name: Annotated[str, typer.Option(help="What the host is to be called; default: what it calls itself.")] = "",
    expires: Annotated[str, typer.Option(help="How long the token can be used: 1h, 30m, 7d.")] = "1h",
    json: Json = False,
) -> None:
    """Make a token by which one machine may join as a host, once, and print the command that does it there."""
    from app.cli.control import moment
    from app.client import MegaFlow
    from app.instances import joining
    from app.ledger import hosts

    with MegaFlow() as flow:
        joining.check(flow.settings)
        until = moment(expires, now := datetime.now(UTC))
        seconds = 0.0 if until is None else (until - now).total_seconds()
        token = hosts.invite(flow.database, name=name, expires_s=seconds)
        url = flow.settings.web_base()
    answer({"token": token, "url": url}, f"megaflow worker join {url} --token {token}", json=json)
