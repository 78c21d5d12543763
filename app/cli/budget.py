"""`megaflow budget`: the money that a run may spend on model calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.later import later
from app.cli.show import as_json, console
from app.errors import LimitInvalid

if TYPE_CHECKING:
    from app.client import MegaFlow
    from app.ledger import pauses
else:
    MegaFlow = later("app.client", "MegaFlow")
    pauses = later("app.ledger.pauses")

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def register(cli: typer.Typer) -> None:
    cli.command()(budget)


def budget(
    run: Annotated[str, typer.Argument(help="A run, or the end of its id.")],
    usd: Annotated[str, typer.Argument(help="US dollars for its model calls, all tasks together; `none` lifts it.")],
    json: Json = False,
) -> None:
    """Give a run another budget. One that was paused because it had spent the old one goes on."""
    with MegaFlow() as flow:
        run_id, spent = pauses.set_budget(flow.database, run, _dollars(usd))
    if json:
        as_json({"run_id": run_id, "budget_usd": _dollars(usd), "spent_usd": spent})
        return
    bound = "no budget" if usd == "none" else f"a budget of ${_dollars(usd):,.2f}"
    console.print(f"run {str(run_id)[-12:]}: {bound}, ${spent:,.4f} spent", highlight=False)


def _dollars(word: str) -> float | None:
    if word == "none":
        return None
    try:
        found = float(word)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise LimitInvalid(f"expected US dollars above 0, or `none`, found {word!r}; nothing was changed")
    return found
