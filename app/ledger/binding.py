"""What keeps a line waiting at this moment: the dispatcher's rules, asked for their reasons.

A line is a user's tasks of one mode (as asked for) and class. Limits are named `slots:ephemeral.standard`,
`pool:persistent.gpu`, `class:gpu`, `quota:running:alice`, `quota:instances:alice`, `quota:spend:alice`,
`quota:run:ID`; a pause stands beside them as `pause:user:alice`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection, text

from app.ledger import classes, pauses, quotas, waiting
from app.ledger.classes import Offer
from app.ledger.quotas import QuotaBook
from app.ledger.waiting import BoundedRun
from app.models.instance import queue_of
from app.models.kinds import PauseKind
from app.models.spec import Mode
from app.settings import Settings


class Line(NamedTuple):
    """Whose tasks, of which mode as asked for, and class."""

    user_name: str
    mode: Mode
    resource_class: str


@dataclass(frozen=True, slots=True)
class Bound:
    """One limit that binds. `help` is a command that would lift it, or what to wait for."""

    limit: str
    used: float | None
    capacity: float | None
    help: str
    why: str = ""
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Pool:
    """The standing instances of a class that take work, or will."""

    slots: int = 0  # of those that are ready
    ready: int = 0
    coming: int = 0  # requested or booting
    draining: int = 0


@dataclass(frozen=True, slots=True)
class Look:
    """Everything that the dispatcher decides by, seen in one transaction."""

    offers: Mapping[str, Offer]
    pools: Mapping[str, Pool]
    live: Counter[tuple[Mode, str]]  # attempts dispatched or running, by mode and class
    users: Counter[str]  # the same, by user
    ephemeral: Counter[str]  # ephemeral ones, by user: each has an instance of its own
    book: QuotaBook
    paused: Mapping[tuple[str, str], tuple[datetime, str]]  # kind and name: since when, why
    since: Mapping[tuple[str, Line], datetime]  # open bindings
    bounded: Mapping[UUID, BoundedRun]  # runs with a bound on their attempts at once, by id

    def binding(self, line: Line, run_id: UUID | None = None, waiting: int = 1) -> list[Bound]:
        """What binds a line now, the widest first; nothing when its turn may come with the next pass.

        waiting: how many tasks of it wait, so that what is proposed is worth the trouble.
        """
        found = self._pauses(line, run_id) or self._class(line) or self._user(line) or self._run(run_id)
        found = found or self._places(line, waiting)
        return [replace(bound, since=bound.since or self.since.get((bound.limit, line))) for bound in found]

    def _pauses(self, line: Line, run_id: UUID | None) -> list[Bound]:
        asked = [(PauseKind.USER, line.user_name), (PauseKind.CLASS, line.resource_class)]
        if run_id is not None:
            asked.insert(0, (PauseKind.RUN, str(run_id)))
        return [
            Bound(
                pauses.limit_name(kind, name),
                None,
                None,
                f"megaflow resume {kind} {name}",
                why=self.paused[kind, name][1],
                since=self.paused[kind, name][0],
            )
            for kind, name in asked
            if (kind, name) in self.paused
        ]

    def _class(self, line: Line) -> list[Bound]:
        offer, name = self.offers.get(line.resource_class), line.resource_class
        option = "--pool-max 1" if line.mode is Mode.PERSISTENT else "--ephemeral 1"
        advice = f"megaflow classes set {name} {option}"
        if offer is None:
            return [Bound(f"class:{name}", None, None, advice, why="the class is not defined")]
        if not offer.could_run(line.mode) and not (line.mode is not Mode.EPHEMERAL and name in self.pools):
            return [Bound(f"class:{name}", None, 0, advice, why=f"the class has no capacity for mode {line.mode}")]
        return []

    def _user(self, line: Line) -> list[Bound]:
        user, quota = line.user_name, self.book.of(line.user_name)
        found = []
        live, spent = self.users[user], self.book.spent(user)
        if quota.running is not None and live >= quota.running:
            advice = f"megaflow quota set {user} --running {_more(quota.running)}"
            found.append(Bound(f"quota:running:{user}", live, quota.running, advice))
        if quota.spend_usd is not None and spent >= quota.spend_usd:
            advice = f"megaflow quota set {user} --spend {_more(math.ceil(max(spent, quota.spend_usd)))}"
            found.append(Bound(f"quota:spend:{user}", spent, quota.spend_usd, advice))
        return found

    def _run(self, run_id: UUID | None) -> list[Bound]:
        run = self.bounded.get(run_id) if run_id else None
        if run is None or run.room:
            return []
        advice = "wait: the next one begins when one of the run's attempts ends"
        return [Bound(run.limit, run.live, run.max_running, advice, why="the run was submitted with --concurrency")]

    def _places(self, line: Line, waiting: int) -> list[Bound]:
        """`auto` waits only while both kinds of place are taken."""
        options = (Mode.PERSISTENT, Mode.EPHEMERAL) if line.mode is Mode.AUTO else (line.mode,)
        found: list[Bound] = []
        for mode in options:
            bound = self._ephemeral(line, waiting) if mode is Mode.EPHEMERAL else self._persistent(line)
            if bound is None:
                return []
            if not (line.mode is Mode.AUTO and bound.capacity == 0):  # not offered at all: the other one is what binds
                found.append(bound)
        return found

    def _ephemeral(self, line: Line, waiting: int) -> Bound | None:
        quota, user, name = self.book.of(line.user_name), line.user_name, line.resource_class
        mine, live = self.ephemeral[user], self.live[Mode.EPHEMERAL, name]
        capacity = self.offers[name].ephemeral_capacity
        if capacity and quota.instances is not None and mine >= quota.instances:
            advice = f"megaflow quota set {user} --instances {_more(quota.instances)}"
            return Bound(f"quota:instances:{user}", mine, quota.instances, advice)
        if live >= capacity:
            advice = f"megaflow classes set {name} --ephemeral {capacity + max(1, min(waiting, capacity))}"
            return Bound(f"slots:{queue_of(Mode.EPHEMERAL, name)}", live, capacity, advice)
        return None

    def _persistent(self, line: Line) -> Bound | None:
        name = line.resource_class
        offer, pool = self.offers[name], self.pools.get(name, Pool())
        queue, live = queue_of(Mode.PERSISTENT, name), self.live[Mode.PERSISTENT, name]
        if pool.slots == 0:
            why = f"no standing instance is ready; {pool.coming} on the way, {pool.draining} draining"
            offered = max(offer.pool_max, pool.coming + pool.draining)
            advice = (
                "wait: they are booting" if pool.coming else "wait, or see `megaflow instances` and `megaflow doctor`"
            )
            return Bound(f"pool:{queue}", 0, offered, advice, why=why)
        if live >= pool.slots:
            if pool.coming or pool.ready < offer.pool_max:
                advice = f"wait: the pool may grow to {offer.pool_max}; {pool.coming} on the way"
            else:
                advice = f"megaflow classes set {name} --pool-max {_more(max(pool.ready, offer.pool_max))}"
            return Bound(f"slots:{queue}", live, pool.slots, advice)
        return None


def _more(limit: int) -> int:
    """A limit worth trying instead: twice as much."""
    return max(1, limit * 2)


def look(connection: Connection, settings: Settings) -> Look:
    """The state of things as the dispatcher sees it."""
    live, users, ephemeral = _live(connection)
    return Look(
        offers=classes.load(connection, settings),
        pools=_pools(connection),
        live=live,
        users=users,
        ephemeral=ephemeral,
        book=quotas.load(connection),
        paused={
            (row.kind, row.name): (row.since, row.reason)
            for row in connection.execute(text("SELECT kind, name, since, reason FROM pauses"))
        },
        since={
            (row.limit_name, Line(row.user_name, Mode(row.mode), row.resource_class)): row.since
            for row in connection.execute(
                text(
                    "SELECT limit_name, user_name, mode, resource_class, since FROM bindings"
                    " WHERE until IS NULL AND user_name <> '*'"
                )
            )
        },
        bounded={run.run_id: run for run in waiting.bounded_runs(connection)},
    )


def _live(connection: Connection) -> tuple[Counter[tuple[Mode, str]], Counter[str], Counter[str]]:
    by_key: Counter[tuple[Mode, str]] = Counter()
    users: Counter[str] = Counter()
    ephemeral: Counter[str] = Counter()
    for row in connection.execute(
        text(
            "SELECT mode, resource_class, user_name, count(*) AS live FROM attempts"
            " WHERE state IN ('dispatched', 'running') GROUP BY 1, 2, 3"
        )
    ):
        by_key[Mode(row.mode), row.resource_class] += row.live
        users[row.user_name] += row.live
        if row.mode == Mode.EPHEMERAL:
            ephemeral[row.user_name] += row.live
    return by_key, users, ephemeral


def _pools(connection: Connection) -> dict[str, Pool]:
    rows = connection.execute(
        text(
            "SELECT resource_class, coalesce(sum(slots) FILTER (WHERE state = 'ready'), 0)::int AS slots,"
            " count(*) FILTER (WHERE state = 'ready') AS ready,"
            " count(*) FILTER (WHERE state IN ('requested', 'booting')) AS coming,"
            " count(*) FILTER (WHERE state = 'draining') AS draining"
            " FROM instances WHERE mode = 'persistent' AND state NOT IN ('terminated', 'failed') GROUP BY 1"
        )
    )
    return {row.resource_class: Pool(row.slots, row.ready, row.coming, row.draining) for row in rows}
