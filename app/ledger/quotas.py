"""Stores quotas of users: their use at once, their weight in the fair share, their spending.

The row `*` applies to everybody without a row of their own. Use is not stored, but counted from live rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from pydantic import Field
from sqlalchemy import Connection, text

from app.errors import LimitInvalid, QuotaExceeded
from app.ledger import events
from app.ledger.database import Database, sql
from app.ledger.events import Fact
from app.models.wire import Wire, checked

EVERYBODY = "*"
"""Name of the row for users without a row of their own."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Quotas of one user; None: no such quota."""

    user_name: str
    weight: float = 1.0  # in the fair share; twice the weight is twice the slots
    running: int | None = None  # live attempts
    pending: int | None = None  # accepted tasks that have not been admitted
    instances: int | None = None  # ephemeral instances
    spend_usd: float | None = None  # total since the account was opened or reset


@dataclass(frozen=True, slots=True)
class Quotas:
    """All quotas and accounts, read at once."""

    quotas: Mapping[str, Quota]
    accounts: Mapping[str, float]

    def of(self, user_name: str) -> Quota:
        """Returns the user's own row, else that of `*`, else no quota and weight 1."""
        if user_name in self.quotas:
            return self.quotas[user_name]
        return replace(self.quotas.get(EVERYBODY, Quota(EVERYBODY)), user_name=user_name)

    def spent(self, user_name: str) -> float:
        """Returns the user's spending on model calls in US dollars, as far as it is known."""
        return self.accounts.get(user_name, 0.0)


def load(connection: Connection) -> Quotas:
    """Reads all quotas and accounts."""
    rows = sql(connection, "SELECT user_name, weight, running, pending, instances, spend_usd FROM quotas")
    accounts = sql(connection, "SELECT user_name, spent_usd FROM accounts")
    return Quotas({row.user_name: Quota(*row) for row in rows}, {row.user_name: row.spent_usd for row in accounts})


def check_pending(connection: Connection, user_name: str, adding: int) -> None:
    """Refuses `adding` more tasks if the user's waiting tasks would exceed the quota; call it before writing them.

    Two enqueues of one user run this one after the other, until the caller's transaction ends: both cannot take the
    same room. Other users, and users without a quota, do not wait.

    Raises: QuotaExceeded.
    """
    quota = connection.execute(_PENDING_QUOTA, {"user": user_name}).scalar()
    if quota is None:
        return
    # A lock per user and not of the row: `*` is shared, and `megaflow quota set` must not wait for an enqueue.
    sql(connection, "SELECT pg_advisory_xact_lock(hashtextextended('quota:pending:' || :user, 0))", {"user": user_name})
    quota = connection.execute(_PENDING_QUOTA, {"user": user_name}).scalar()
    if quota is None:
        return
    waiting = connection.execute(_PENDING, {"user": user_name, "most": quota + 1}).scalar_one()
    if waiting + adding > quota:
        count = f"more than {quota}" if waiting > quota else str(waiting)
        raise QuotaExceeded(
            f"expected user {user_name!r} to have at most {quota} waiting tasks, found {count} and {adding} more;"
            f" wait until some have started, or try `megaflow quota set {user_name} --pending {waiting + adding}`;"
            f" nothing was accepted"
        )


# `true` sorts last: the user's own row comes before `*`.
_PENDING_QUOTA = text("SELECT pending FROM quotas WHERE user_name IN (:user, '*') ORDER BY user_name = '*' LIMIT 1")
# Three parts, each with its own index; no more than `most` rows of each are counted.
_PENDING = text(
    "SELECT count(*) FROM ("
    "(SELECT 1 FROM tasks WHERE state = 'pending' AND in_line AND user_name = :user LIMIT :most) UNION ALL"
    " (SELECT 1 FROM tasks WHERE state = 'pending' AND NOT in_line AND NOT waits AND user_name = :user LIMIT :most)"
    " UNION ALL (SELECT 1 FROM tasks WHERE state = 'pending' AND waits AND user_name = :user LIMIT :most)) AS waiting"
)


_MOST = 1_000_000_000


class QuotaChanges(Wire):
    """The fields to change: a missing field stays as it is, None removes the quota (weight: back to 1)."""

    weight: float | None = Field(default=None, ge=0.001, le=_MOST)
    running: int | None = Field(default=None, ge=0, le=_MOST)
    pending: int | None = Field(default=None, ge=0, le=_MOST)
    instances: int | None = Field(default=None, ge=0, le=_MOST)
    spend_usd: float | None = Field(default=None, ge=0, le=_MOST)


def set_quota(database: Database, user_name: str, **changes: Any) -> Quota:
    """Changes the named fields, as `QuotaChanges` has them. In force with the next pass.

    A user's first row begins as a copy of `*`, so that setting one user's weight does not remove the quotas that `*`
    sets for them.

    Raises: LimitInvalid: nothing was changed.
    """
    if not user_name.strip() or not user_name.isprintable() or len(user_name) > 200:
        raise LimitInvalid(f"expected the name of a user, or `*` for all others, found {user_name!r}")
    values = checked(QuotaChanges, changes, f"quota of {user_name!r}").model_dump(exclude_unset=True)
    if not values:
        raise LimitInvalid(f"quota of {user_name!r}: expected something to set")
    if "weight" in values:
        values["weight"] = values["weight"] or 1.0
    with database.begin() as connection:
        connection.execute(_FIRST_ROW, {"user": user_name})
        columns = ", ".join(f"{field} = :{field}" for field in values)  # names of our own table above
        row = sql(
            connection,
            f"UPDATE quotas SET {columns} WHERE user_name = :user RETURNING *",  # noqa: S608
            {**values, "user": user_name},
        ).one()
        events.append(connection, Fact("quota.set", data={"user": user_name, **values}))
        events.wake_dispatcher(connection)
        return Quota(*row)


_FIRST_ROW = text(
    "INSERT INTO quotas (user_name, weight, running, pending, instances, spend_usd)"
    " SELECT :user, coalesce(q.weight, 1), q.running, q.pending, q.instances, q.spend_usd"
    " FROM (SELECT 1) AS one LEFT JOIN quotas q ON q.user_name = '*' ON CONFLICT (user_name) DO NOTHING"
)


def remove(database: Database, user_name: str) -> None:
    """Removes a user's own row: `*` applies to them again. Their spending stays on their account.

    Raises: LimitInvalid: there is no such row.
    """
    with database.begin() as connection:
        deleted = sql(
            connection, "DELETE FROM quotas WHERE user_name = :user RETURNING user_name", {"user": user_name}
        ).first()
        if deleted is None:
            known = ", ".join(sql(connection, "SELECT user_name FROM quotas ORDER BY 1").scalars())
            raise LimitInvalid(f"user {user_name!r} has no quota of their own; these have: {known or 'nobody yet'}")
        events.append(connection, Fact("quota.removed", data={"user": user_name}))
        events.wake_dispatcher(connection)


@dataclass(frozen=True, slots=True)
class QuotaUsage:
    """A user's quota and current use. `own`: the quota is the user's own row and not `*`."""

    user: str
    own: bool
    quota: Quota
    running: int
    pending: int
    instances: int
    spent_usd: float
    spent_since: datetime | None


_USAGE = text(
    "WITH live AS (SELECT user_name, count(*) AS running, count(*) FILTER (WHERE mode = 'ephemeral') AS instances"
    " FROM attempts WHERE state IN ('dispatched', 'running') GROUP BY 1),"
    " waiting AS (SELECT user_name, count(*) AS pending FROM tasks WHERE state = 'pending' GROUP BY 1)"
    " SELECT user_name AS user, coalesce(running, 0) AS running, coalesce(pending, 0) AS pending,"
    " coalesce(instances, 0) AS instances, coalesce(spent_usd, 0) AS spent_usd, since AS spent_since"
    " FROM (SELECT user_name FROM quotas) AS rows FULL JOIN live USING (user_name) FULL JOIN waiting USING (user_name)"
    " FULL JOIN accounts USING (user_name) ORDER BY user_name"
)


def usage(database: Database) -> list[QuotaUsage]:
    """Returns all users with a quota, an account, or waiting or running work; `*` first, without use of its own."""
    with database.begin() as connection:
        return usages(connection)


def usages(connection: Connection) -> list[QuotaUsage]:
    """Returns the same as `usage`, within a transaction."""
    book = load(connection)
    rows = connection.execute(_USAGE)
    return [QuotaUsage(**row._asdict(), own=row.user in book.quotas, quota=book.of(row.user)) for row in rows]
