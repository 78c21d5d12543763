"""Commands about limits and quotas: `megaflow limits [set | clear]`, `megaflow quota [set | clear]`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import typer

from app.cli.show import Json, answer, listing, say
from app.client import MegaFlow
from app.errors import LimitInvalid
from app.ledger import limits as ledger
from app.ledger import quotas
from app.ledger.limits import Use
from app.ledger.quotas import QuotaUsage
from app.models.kinds import LIMIT_KINDS as KINDS

limits = typer.Typer(help="Limits: show their use, waiting attempts and capacity; set or clear them.")
quota = typer.Typer(help="Quotas: show, set or clear what a user may have at once, and the weight in the fair share.")


Why = Annotated[str, typer.Option("--reason", help="Stored with the user and the time; shown on the page `/actions`.")]


@limits.callback(invoke_without_command=True)
def show_limits(context: typer.Context, json: Json = False) -> None:
    """List limits: their use, waiting attempts and capacity."""
    if context.invoked_subcommand is not None:
        return
    with MegaFlow() as flow:
        rows = flow.installation.limits(lambda error: say(f"the use of model calls is not known: {error}"))
    listing(rows, _LIMIT_COLUMNS, json=json)


_LIMIT_COLUMNS: dict[str, Callable[[Use], str]] = {
    "limit": lambda use: use.name,
    "used": lambda use: _said(use.used),
    "waiting": lambda use: _said(use.waiting),
    "capacity": lambda use: _said(use.capacity),
    "by": lambda use: use.source,
}


# A number below 0 must not be read as an option: the command refuses it with a reason.
@limits.command(name="set", context_settings={"ignore_unknown_options": True})
def set_limit(
    name: Annotated[str, typer.Argument(help=f"KIND:NAME, or KIND:* for all. Kinds: {', '.join(KINDS)}.")],
    capacity: Annotated[str, typer.Argument(help="A whole number; 0 admits nothing.")],
    reason: Why = "",
    json: Json = False,
) -> None:
    """Set a limit, in force at once. Holders stay; the next one enters when there is room."""
    with MegaFlow() as flow:
        amount = number(f"limit {name!r}", capacity)
        flow.installation.set_limit(name, amount, reason)
    meaning = KINDS[ledger.kind_of(name)[0]]
    answer({"name": name, "capacity": int(amount)}, f"{name}: {int(amount)} ({meaning})", json=json)


@limits.command(name="clear")
def clear_limit(name: Annotated[str, typer.Argument()], reason: Why = "", json: Json = False) -> None:
    """Reset a limit to its default."""
    with MegaFlow() as flow:
        flow.installation.set_limit(name, None, reason)
    answer({"name": name, "capacity": None}, f"{name}: back to the default", json=json)


@quota.callback(invoke_without_command=True)
def show_quotas(context: typer.Context, json: Json = False) -> None:
    """List quotas: what a user may have at once, and the weight in the fair share."""
    if context.invoked_subcommand is not None:
        return
    with MegaFlow() as flow:
        rows = flow.installation.quotas()
    listing(rows, _QUOTA_COLUMNS, json=json)


_QUOTA_COLUMNS: dict[str, Callable[[QuotaUsage], str]] = {
    "user": lambda use: use.user,
    "weight": lambda use: f"{use.quota.weight:g}",
    "running": lambda use: _of(use.running, use.quota.running),
    "pending": lambda use: _of(use.pending, use.quota.pending),
    "instances": lambda use: _of(use.instances, use.quota.instances),
    "spent": lambda use: _of(use.spent_usd, use.quota.spend_usd, "${:,.2f}"),
    "quota of": lambda use: "their own" if use.own else quotas.EVERYBODY,
}


@quota.command(name="set")
def set_quota(
    user: Annotated[str, typer.Argument(help="A user, or * for everybody without a quota of their own.")],
    running: Annotated[str | None, typer.Option(help="Attempts at once.")] = None,
    pending: Annotated[str | None, typer.Option(help="Waiting tasks; more are refused.")] = None,
    instances: Annotated[str | None, typer.Option(help="Ephemeral instances at once.")] = None,
    spend: Annotated[str | None, typer.Option(help="US dollars for all model calls.")] = None,
    weight: Annotated[str | None, typer.Option(help="Weight in the fair share: 2 gets twice as much as 1.")] = None,
    reason: Why = "",
    json: Json = False,
) -> None:
    """Change the given values, in force at once; the others stay. `none` lifts a quota."""
    values = {"running": running, "pending": pending, "instances": instances, "spend_usd": spend, "weight": weight}
    with MegaFlow() as flow:
        changes = {field: _quota_number(user, field, word) for field, word in values.items() if word is not None}
        changed = flow.installation.set_quota(user, changes, reason)
    answer(changed, f"quota of {user}: {_summary(asdict(changed))}", json=json)


@quota.command()
def clear(user: Annotated[str, typer.Argument()], reason: Why = "", json: Json = False) -> None:
    """Remove a user's own quota: the default quota (`*`) applies again."""
    with MegaFlow() as flow:
        flow.installation.clear_quota(user, reason)
    answer({"user_name": user, "own": False}, f"quota of {user}: that of everybody", json=json)


def _summary(changed: dict[str, Any]) -> str:
    return ", ".join(
        f"{field} {'none' if value is None else format(value, 'g')}"
        for field, value in changed.items()
        if field != "user_name"
    )


def number(what: str, said: str) -> float:
    """Raises: LimitInvalid."""
    try:
        return int(said) if said.lstrip("+-").isdecimal() else float(said)
    except ValueError:
        raise LimitInvalid(f"{what}: expected a number, found {said!r}; nothing was changed") from None


def _quota_number(user: str, field: str, said: str) -> float | None:
    return None if said == "none" else number(f"quota of {user!r}, {field}", said)


def _said(value: int | None) -> str:
    return "-" if value is None else str(value)


def _of(used: float, most: float | None, form: str = "{}") -> str:
    return form.format(used) if most is None else f"{form.format(used)} of {form.format(most)}"
