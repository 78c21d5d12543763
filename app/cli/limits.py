"""Commands about limits and quotas: `megaflow limits [set | clear]`, `megaflow quota [set | clear | reset]`."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.later import later
from app.cli.show import as_json, console, say
from app.cli.tables import Table
from app.errors import BrokerUnavailable, LimitInvalid
from app.models.kinds import LIMIT_KINDS as KINDS

if TYPE_CHECKING:
    import redis

    from app.client import MegaFlow
    from app.ledger import limits as ledger
    from app.ledger import quotas
    from app.ledger.limits import Use, everybody
    from app.ledger.quotas import QuotaUsage
    from app.model_service import limiter
else:
    redis = later("redis")
    MegaFlow = later("app.client", "MegaFlow")
    ledger = later("app.ledger.limits")
    quotas = later("app.ledger.quotas")
    Use = later("app.ledger.limits", "Use")
    everybody = later("app.ledger.limits", "everybody")
    limiter = later("app.model_service.limiter")

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]

limits = typer.Typer(help="Limits: who uses them, who waits, what they are set to.")
quota = typer.Typer(help="Quotas: what a user may have at once, and their weight in the fair share.")


def register(cli: typer.Typer) -> None:
    cli.add_typer(limits, name="limits")
    cli.add_typer(quota, name="quota")


# --- Limits ---------------------------------------------------------------------------------------------------------


@limits.callback(invoke_without_command=True)
def show_limits(context: typer.Context, json: Json = False) -> None:
    """Limits: who uses them, who waits, what they are set to."""
    if context.invoked_subcommand is not None:
        return
    with MegaFlow() as flow:
        found = _with_model_calls(ledger.show(flow.database, flow.settings), flow)
    if json:
        as_json([asdict(use) for use in found])
        return
    table = Table("limit", "used", "waiting", "capacity", "by", "oldest holder")
    for use in found:
        table.add_row(*_limit_cells(use))
    console.print(table)


def _with_model_calls(found: list[Use], flow: MegaFlow) -> list[Use]:
    """Their use is in Redis; without it the rest is shown all the same."""
    try:
        with redis.Redis.from_url(flow.settings.redis(), socket_connect_timeout=2, socket_timeout=5) as client:
            calls = limiter.in_use(client, limiter.prefix_of(flow.settings))
    except BrokerUnavailable as error:
        say(f"the use of model calls is not known: {error}")
        return found
    by_name = {use.name: use for use in found}
    for name, call in calls.items():
        applies = by_name.get(name) or by_name.get(everybody(name)) or Use(name, None, None, None, "default")
        by_name[name] = replace(applies, name=name, used=call.used, waiting=call.waiting)
    return sorted(by_name.values(), key=lambda use: use.name)


def _limit_cells(use: Use) -> list[str]:
    holder = "" if use.oldest_since is None else f"for {_age(use.oldest_since)}"
    if holder and use.oldest_attempt is not None:
        holder += f", attempt {str(use.oldest_attempt)[-12:]}"
    return [use.name, _said(use.used), _said(use.waiting), _said(use.capacity), use.source, holder]


# A number below 0 is not an option: it is to be refused with a reason.
@limits.command(name="set", context_settings={"ignore_unknown_options": True})
def set_limit(
    name: Annotated[str, typer.Argument(help=f"KIND:NAME, or KIND:* for all. Kinds: {', '.join(KINDS)}.")],
    capacity: Annotated[str, typer.Argument(help="A whole number; 0 lets none in.")],
    json: Json = False,
) -> None:
    """Set a limit. In force at once: holders stay, and the next enters when there is room."""
    with MegaFlow() as flow:
        number = _number(f"limit {name!r}", capacity)
        ledger.set_limit(flow.database, name, number)
    if json:
        as_json({"name": name, "capacity": int(number)})
    else:
        kind, _ = ledger.kind_of(name)
        console.print(f"{name}: {int(number)} ({KINDS[kind]})", highlight=False, soft_wrap=True)


@limits.command(name="clear")
def clear_limit(name: Annotated[str, typer.Argument()], json: Json = False) -> None:
    """Give a limit its default back."""
    with MegaFlow() as flow:
        ledger.clear_limit(flow.database, name)
    if json:
        as_json({"name": name, "capacity": None})
    else:
        console.print(f"{name}: back to the default", highlight=False)


# --- Quotas ---------------------------------------------------------------------------------------------------------


@quota.callback(invoke_without_command=True)
def show_quotas(context: typer.Context, json: Json = False) -> None:
    """Quotas: what a user may have at once, and their weight in the fair share."""
    if context.invoked_subcommand is not None:
        return
    with MegaFlow() as flow:
        found = quotas.usage(flow.database)
    if json:
        as_json([use.as_dict() for use in found])
        return
    columns = ("user", "weight", "running", "pending", "instances", "spent", "quota of")
    table = Table(*columns)
    for use in found:
        table.add_row(*_quota_cells(use))
    console.print(table)


def _quota_cells(use: QuotaUsage) -> list[str]:
    quota = use.quota
    if quota.user_name == quotas.EVERYBODY:
        spend = "" if quota.spend_usd is None else f"≤ ${quota.spend_usd:,.2f}"
        counts = ["" if most is None else f"≤ {most}" for most in (quota.running, quota.pending, quota.instances)]
        return [quota.user_name, f"{quota.weight:g}", *counts, spend, "everybody else"]
    spend = f"${use.spent_usd:,.2f}" + ("" if quota.spend_usd is None else f" of ${quota.spend_usd:,.2f}")
    return [
        quota.user_name,
        f"{quota.weight:g}",
        _of(use.running, quota.running),
        _of(use.pending, quota.pending),
        _of(use.instances, quota.instances),
        spend,
        "their own" if use.own else quotas.EVERYBODY,
    ]


@quota.command(name="set")
def set_quota(
    user: Annotated[str, typer.Argument(help="A user, or * for everybody without a quota of their own.")],
    running: Annotated[str | None, typer.Option(help="Attempts at once.")] = None,
    pending: Annotated[str | None, typer.Option(help="Tasks that wait; more are refused.")] = None,
    instances: Annotated[str | None, typer.Option(help="Ephemeral instances at once.")] = None,
    spend: Annotated[str | None, typer.Option(help="US dollars on model calls, in all.")] = None,
    weight: Annotated[str | None, typer.Option(help="In the fair share: 2 gets twice as much as 1.")] = None,
    json: Json = False,
) -> None:
    """Change what is named, the rest stays; `none` lifts a quota. In force at once."""
    said = {"running": running, "pending": pending, "instances": instances, "spend_usd": spend, "weight": weight}
    with MegaFlow() as flow:
        changes = {field: _quota_number(user, field, word) for field, word in said.items() if word is not None}
        changed = quotas.set_quota(flow.database, user, **changes)
    if json:
        as_json(asdict(changed))
    else:
        console.print(f"quota of {user}: {_summary(asdict(changed))}", highlight=False, soft_wrap=True)


@quota.command()
def clear(user: Annotated[str, typer.Argument()], json: Json = False) -> None:
    """Take a user's own quota away: that of everybody (`*`) applies to them again."""
    with MegaFlow() as flow:
        quotas.remove(flow.database, user)
    if json:
        as_json({"user_name": user, "own": False})
    else:
        console.print(f"quota of {user}: that of everybody", highlight=False)


@quota.command()
def reset(user: Annotated[str, typer.Argument()], json: Json = False) -> None:
    """Begin a user's account of what they spent again at 0, e.g. for a new month."""
    with MegaFlow() as flow:
        spent = quotas.reset_spent(flow.database, user)
    if json:
        as_json({"user_name": user, "spent_usd_before": spent})
    else:
        console.print(f"account of {user}: was ${spent:,.2f}, is $0.00", highlight=False)


def _summary(changed: dict[str, Any]) -> str:
    return ", ".join(
        f"{field} {'none' if value is None else format(value, 'g')}"
        for field, value in changed.items()
        if field != "user_name"
    )


# --- Values as people write and read them ---------------------------------------------------------------------------


def _number(what: str, said: str) -> float:
    """Raises: LimitInvalid."""
    try:
        return int(said) if said.lstrip("+-").isdecimal() else float(said)
    except ValueError:
        raise LimitInvalid(f"{what}: expected a number, found {said!r}; nothing was changed") from None


def _quota_number(user: str, field: str, said: str) -> float | None:
    return None if said == "none" else _number(f"quota of {user!r}, {field}", said)


def _said(value: int | None) -> str:
    return "-" if value is None else str(value)


def _of(used: int, most: int | None) -> str:
    return str(used) if most is None else f"{used} of {most}"


def _age(since: datetime) -> str:
    seconds = max(0.0, (datetime.now(UTC) - since).total_seconds())
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
