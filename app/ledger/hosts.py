"""Registers machines that join with one-time tokens, and removes those that leave."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import Connection
from uuid_utils import compat as uuids

from app.errors import NotSignedIn, OptionInvalid, UnknownName
from app.ledger import host_roles
from app.ledger.database import Database, sql

EXPIRES_S = 3600.0
"""Default lifetime of a token, in seconds."""
LEAVES = "its host leaves"
"""Reason for draining the instances of a host that leaves."""
_MOST_S = 30 * 86400.0
_KEPT = "30 days"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class JoinedHost:
    """A machine that joined."""

    id: UUID
    name: str
    account: str
    instance_id: UUID | None
    joined_at: datetime
    left_at: datetime | None


@dataclass(frozen=True, slots=True)
class HostSecrets:
    """Secrets of a host for authentication; the ledger stores only digests."""

    password: str
    """Password of its role in PostgreSQL and its user in Redis."""
    leave: str
    """Secret that authenticates the host's request to leave."""


def invite(database: Database, *, name: str = "", expires_s: float = EXPIRES_S, instance_id: UUID | None = None) -> str:
    """Creates a token with which one machine may join once; it is returned only here.

    name: of the host; empty: the machine's own name. expires_s: seconds. instance_id: the host's only instance; when it
    has ended, the host counts as ended, too.

    Raises: OptionInvalid; DatabaseUnavailable.
    """
    if name and not _NAME.fullmatch(name):
        raise OptionInvalid(
            f"expected a host's name of letters, digits and . _ -, found {name[:80]!r}; no token was made"
        )
    if not 0 < expires_s <= _MOST_S:
        raise OptionInvalid(f"expected a time of more than 0 and at most 30 days, found {expires_s:g} s")
    secret = f"mfj_{secrets.token_urlsafe(32)}"
    values = {"digest": digest(secret), "name": name, "instance": instance_id, "expires": timedelta(seconds=expires_s)}
    with database.begin() as connection:
        sql(connection, f"DELETE FROM join_tokens WHERE expires_at < clock_timestamp() - interval '{_KEPT}'")  # noqa: S608
        sql(
            connection,
            "INSERT INTO join_tokens (token_sha256, host_name, instance_id, expires_at)"
            " VALUES (:digest, :name, :instance, clock_timestamp() + CAST(:expires AS interval))",
            values,
        )
    return secret


def admit(connection: Connection, token: str, called: str, installation: str) -> tuple[JoinedHost, HostSecrets]:
    """Uses up a token: registers its host and creates the host's role. A rollback undoes all of it.

    called: the machine's own name, used if the token has none; a name in use gets a suffix.

    Raises: NotSignedIn: the token is unknown, used or expired. InstallationFailed.
    """
    row = sql(
        connection,
        "SELECT host_name, instance_id, used_at, expires_at, expires_at <= clock_timestamp() AS expired"
        " FROM join_tokens WHERE token_sha256 = :digest FOR UPDATE",
        {"digest": digest(token)},
    ).first()
    if row is None or row.expired or row.used_at is not None:
        raise NotSignedIn(_why_not(row))
    host_id = uuids.uuid7()
    end = host_id.hex[-12:]
    credentials = HostSecrets(password=secrets.token_urlsafe(32), leave=f"mfl_{secrets.token_urlsafe(32)}")
    values = {
        "id": host_id,
        "name": _free_name(connection, row.host_name or called, end),
        "account": f"mf_{installation}_{end}",
        "broker": digest(credentials.password),
        "secret": digest(credentials.leave),
        "instance": row.instance_id,
        "token": digest(token),
    }
    joined_at = sql(
        connection,
        "WITH used AS (UPDATE join_tokens SET used_at = clock_timestamp(), host_id = :id"
        " WHERE token_sha256 = :token)"
        " INSERT INTO joined_hosts (id, name, account, broker_sha256, secret_sha256, instance_id)"
        " VALUES (:id, :name, :account, :broker, :secret, :instance) RETURNING joined_at",
        values,
    ).scalar_one()
    host_roles.create(connection, values["account"], credentials.password)
    return JoinedHost(host_id, values["name"], values["account"], row.instance_id, joined_at, None), credentials


def _why_not(row: Any) -> str:
    if row is None:
        token = "an unknown one"
    elif row.used_at is not None:
        token = f"one that was used at {row.used_at:%Y-%m-%d %H:%M:%S %Z}"
    else:
        token = f"one that expired at {row.expires_at:%Y-%m-%d %H:%M:%S %Z}"
    return f"expected a token to join with, found {token}; `megaflow worker invite` makes another; nothing was changed"


def _free_name(connection: Connection, name: str, end: str) -> str:
    """Returns the name, with a suffix if a host uses it, joined or not: several may call themselves `localhost`."""
    name = name if _NAME.fullmatch(name) else "host"
    # One at a time: two machines that join at once must not both get the same free name.
    sql(connection, "SELECT pg_advisory_xact_lock(hashtextextended('joined_hosts', 0))")
    values = {"name": name}
    used = (
        "SELECT 1 FROM joined_hosts WHERE name = :name AND left_at IS NULL UNION ALL SELECT 1 FROM instances"
        " WHERE host = :name AND state NOT IN ('terminated', 'failed')"
    )
    return name if sql(connection, used, values).first() is None else f"{name[:50]}-{end}"


_HOSTS = (
    "SELECT j.id, j.name, j.account, j.instance_id, j.joined_at, j.left_at FROM joined_hosts j WHERE j.left_at IS NULL"
)
"""Query that reads no table that a host may lock: a host must not be able to block its own removal."""


@dataclass(frozen=True, slots=True)
class HostUse:
    """A host that works for this ledger. joined_at None: configured by hand, or the control plane's own host."""

    name: str
    joined_at: datetime | None
    seen_at: datetime | None
    instances: int
    slots: int
    running: int


_USE = """
SELECT coalesce(j.name, h.name, s.host) AS name, j.joined_at, h.seen_at,
    coalesce(s.instances, 0) AS instances, coalesce(s.slots, 0) AS slots, coalesce(s.running, 0) AS running
FROM (SELECT name, joined_at FROM joined_hosts WHERE left_at IS NULL) j
FULL JOIN hosts h ON h.name = j.name
FULL JOIN (
    SELECT i.host, count(*)::int AS instances, sum(i.slots)::int AS slots, sum((SELECT count(*) FROM attempts a
        WHERE a.instance_id = i.id AND a.state = 'running'))::int AS running
    FROM instances i WHERE i.host IS NOT NULL AND i.state NOT IN ('terminated', 'failed') GROUP BY i.host
) s ON s.host = coalesce(j.name, h.name)
ORDER BY 1
"""


def in_use(database: Database) -> list[HostUse]:
    """Returns all hosts by name: joined hosts, hosts that report images, and hosts with live instances."""
    return [HostUse(**row._asdict()) for row in database.sql(_USE)]


def joined(database: Database) -> list[JoinedHost]:
    """Returns the joined hosts that have not left, ordered by name."""
    return [JoinedHost(**row._asdict()) for row in database.sql(f"{_HOSTS} ORDER BY j.name")]


def any_joined(database: Database) -> bool:
    """Whether a host has ever joined; if not, no accounts need maintenance."""
    return bool(database.sql("SELECT EXISTS (SELECT FROM joined_hosts)").scalar_one())


def by_name(database: Database, name: str) -> JoinedHost:
    """Raises: UnknownName."""
    hosts = joined(database)
    for host in hosts:
        if host.name == name:
            return host
    raise UnknownName.of("joined host", name, [host.name for host in hosts])


def by_secret(database: Database, secret: str) -> JoinedHost | None:
    """Returns the host that leaves with this secret; None: there is none, or it has left."""
    row = database.sql(f"{_HOSTS} AND j.secret_sha256 = :digest", {"digest": digest(secret)}).first()
    return None if row is None else JoinedHost(**row._asdict())


def broker_users(database: Database) -> dict[str, str]:
    """Returns the Redis users that joined hosts need, with the digests of their passwords."""
    rows = database.sql("SELECT account, broker_sha256 FROM joined_hosts WHERE left_at IS NULL")
    return {row.account: row.broker_sha256 for row in rows}


def ended(database: Database) -> list[JoinedHost]:
    """Returns the hosts that were invited for one instance, which has ended."""
    rows = database.sql(
        f"{_HOSTS} AND EXISTS (SELECT FROM instances i WHERE i.id = j.instance_id"
        " AND i.state IN ('terminated', 'failed'))"
    )
    return [JoinedHost(**row._asdict()) for row in rows]


def leave(connection: Connection, host: JoinedHost) -> None:
    """Marks the host as left and locks out its role; `host_roles.remove` drops the role later. Safe to repeat."""
    values = {"id": host.id}
    sql(connection, "UPDATE joined_hosts SET left_at = coalesce(left_at, clock_timestamp()) WHERE id = :id", values)
    host_roles.lock_out(connection, host.account)


def drop_roles(database: Database) -> bool:
    """Drops the roles of hosts that have left; False: some remain, and the log gives the reason."""
    statement = "SELECT account FROM joined_hosts JOIN pg_roles ON rolname = account WHERE left_at IS NOT NULL"
    accounts = list(database.sql(statement).scalars())
    dropped = [host_roles.remove(database, account) for account in accounts]
    return all(dropped)


def grant_again(database: Database) -> None:
    """Grants the joined hosts their rights again, for tables that a migration added."""
    with database.begin() as connection:
        host_roles.grant(
            connection, sql(connection, "SELECT account FROM joined_hosts WHERE left_at IS NULL").scalars()
        )


def standing(database: Database, name: str) -> Sequence[UUID]:
    """Returns a host's instances that have not ended and were not made by a provider."""
    return list(
        database.sql(
            "SELECT id FROM instances WHERE host = :host AND provider = 'static'"
            " AND state NOT IN ('terminated', 'failed')",
            {"host": name},
        ).scalars()
    )


def digest(secret: str) -> str:
    """Returns the digest of a secret for storage; Redis accepts a password's digest instead of the password."""
    return hashlib.sha256(secret.encode()).hexdigest()
