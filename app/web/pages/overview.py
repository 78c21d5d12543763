"""Pages of the fleet as it is now, and of the list of runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from app.errors import SpecInvalid
from app.instances.prices import prices_of
from app.ledger import instances, limits, listings, results
from app.ledger.instances import LiveInstance
from app.models.states import InstanceState
from app.settings import Settings
from app.web.calls import WebCall, WebServices
from app.web.pages.page import Pages
from app.web.pages.rendering import PageView, fragment

pages = Pages()

_RUNS = 50


def fleet_values(services: WebServices, user_name: str) -> dict[str, Any]:
    """Returns the values of the fleet's page. user_name: only this user's part; empty: all users."""
    settings, database = services.settings, services.database
    shown = limits.show(database, settings)
    uses = shown if not user_name else [use for use in shown if use.name.startswith(("slots:", "pool:"))]
    with database.begin() as connection:
        hour = listings.last_hour(connection, user_name)
    live = [] if user_name else instances.live(database)
    return {
        "slots": [use for use in uses if use.name.startswith(("slots:", "pool:"))],
        "limits": [use for use in uses if not use.name.startswith(("slots:", "pool:")) and (use.used or use.waiting)],
        "queues": listings.waiting_queues(database, settings, user_name),
        "instances": live,
        "hosts": by_host(settings, live),
        "everybody": not user_name,
        "hour": hour,
        "runs": results.runs(database, 8, user_name=user_name or None),
    }


def by_host(settings: Settings, live: Sequence[LiveInstance]) -> list[dict[str, Any]]:
    """Returns slots by host and class, without a host last. usd_hour: of created instances; None: no known price."""
    groups: dict[tuple[str | None, str, str, str], list[LiveInstance]] = {}
    for one in live:
        groups.setdefault((one.host, one.mode.value, one.resource_class, one.provider), []).append(one)
    hosts, price_of = [], prices_of(settings)
    for key, group in sorted(groups.items(), key=lambda item: (item[0][0] is None, *map(str, item[0]))):
        row: dict[str, Any] = dict(zip(("host", "mode", "resource_class", "provider"), key, strict=True))
        row |= {"up": len(group), "used": sum(one.used for one in group), "slots": sum(one.slots for one in group)}
        price = price_of(row["provider"], row["resource_class"])
        created = sum(one.state != InstanceState.REQUESTED for one in group)
        hosts.append({**row, "usd_hour": None if price is None else price * created})
    return hosts


def fleet_text(services: WebServices, user_name: str) -> str:
    """Renders the live part of the page."""
    return fragment("fleet_part.html", fleet_values(services, user_name))


@pages.get("/")
def fleet(call: WebCall) -> PageView:
    """Shows the fleet now."""
    return PageView("fleet.html", fleet_values(call.services, call.whose or ""))


@pages.get("/runs")
def runs(call: WebCall) -> PageView:
    """Lists runs, newest first."""
    before = call.query.get("before")
    try:
        after = UUID(before) if before else None
    except ValueError:
        raise SpecInvalid("expected the id of a run in `before`, found something else") from None
    listed = results.runs(call.database, _RUNS, user_name=call.whose, before=after)
    return PageView("runs.html", {"runs": listed, "more": listed[-1].id if len(listed) == _RUNS else ""})
