"""Stores users of the web server: tokens, sessions of browsers, one-time links, and the log of user actions."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any
from uuid import UUID

from sqlalchemy import Row, insert
from uuid_utils import compat as uuids

from app.errors import OptionInvalid, UnknownName
from app.ledger.database import Database, sql
from app.models.service_tables import UserActionRow

OWNER = "default"
"""User of submissions that name none: the owner of a single-machine installation."""
LINK_S = 3600.0
"""Seconds for which a one-time link is valid."""
SESSION_S = 14 * 86400.0
"""Seconds for which a browser stays signed in."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_MOST_DAYS = 3660


class Scope(StrEnum):
    """Permissions of a token; each includes those before it."""

    READ = "read"  # the user's own runs
    SUBMIT = "submit"  # also start, stop, repeat them
    ADMINISTER = "administer"  # also everybody's runs, limits, quotas, users


class TokenKind(StrEnum):
    TOKEN = "token"
    SESSION = "session"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class UserToken:
    """A token without its secret."""

    id: UUID
    user_name: str
    kind: TokenKind
    scopes: frozenset[Scope]
    label: str
    created_at: datetime
    expires_at: datetime | None
    used_at: datetime | None

    @property
    def highest(self) -> Scope:
        return max(self.scopes, key=list(Scope).index)


def scopes_up_to(highest: Scope | str) -> frozenset[Scope]:
    """Returns a scope with those that it includes. Raises: OptionInvalid."""
    try:
        scope = Scope(highest)
    except ValueError:
        raise OptionInvalid(f"expected a scope of {', '.join(Scope)}; found {highest!r}") from None
    known = list(Scope)
    return frozenset(known[: known.index(scope) + 1])


def add_token(
    database: Database,
    user_name: str,
    scope: Scope | str,
    *,
    kind: TokenKind = TokenKind.TOKEN,
    expires_s: float | None = None,
    label: str = "",
) -> tuple[str, UserToken]:
    """Creates a token; its secret is returned here and never again.

    scope: the highest that it allows. expires_s: seconds from now; None: it does not lapse.
    Raises: OptionInvalid: the name or the time is invalid; DatabaseUnavailable.
    """
    if not _NAME.fullmatch(user_name):
        shown = user_name[:80]
        raise OptionInvalid(
            f"expected a user name of at most 64 letters, digits and . _ @ -, found {shown!r}; no token was made"
        )
    if expires_s is not None and not 0 < expires_s <= _MOST_DAYS * 86400:
        raise OptionInvalid(f"expected a time of more than 0 and at most {_MOST_DAYS} days, found {expires_s:g} s")
    secret = f"mf_{secrets.token_urlsafe(32)}"
    values = {
        "id": uuids.uuid7(),
        "digest": _digest(secret),
        "user": user_name,
        "kind": kind.value,
        "scopes": sorted(scopes_up_to(scope)),
        "label": label[:200],
        "expires": None if expires_s is None else timedelta(seconds=expires_s),
    }
    row = database.sql(
        "INSERT INTO user_tokens (id, token_sha256, user_name, kind, scopes, label, expires_at) VALUES (:id,"
        " :digest, :user, :kind, :scopes, :label, clock_timestamp() + CAST(:expires AS interval)) RETURNING *",
        values,
    ).one()
    return secret, _token(row)


_VALID = "token_sha256 = :digest AND kind = ANY(:kinds) AND (expires_at IS NULL OR expires_at > clock_timestamp())"


def find_token(database: Database, secret: str, *kinds: TokenKind) -> UserToken | None:
    """Returns the token of a secret, of one of these kinds; None: there is none, or it has lapsed."""
    values = {"digest": _digest(secret), "kinds": [kind.value for kind in kinds]}
    with database.begin() as connection:
        row = sql(connection, f"SELECT * FROM user_tokens WHERE {_VALID}", values).first()  # noqa: S608
        if row is None:
            return None
        sql(
            connection,
            "UPDATE user_tokens SET used_at = clock_timestamp() WHERE id = :id"
            " AND (used_at IS NULL OR used_at < clock_timestamp() - interval '1 minute')",
            {"id": row.id},
        )
    return _token(row)


def lapsed(database: Database, tokens: Sequence[tuple[str, TokenKind]]) -> set[tuple[str, TokenKind]]:
    """Returns those of these secrets that are no valid token now, in one query."""
    values = {"digests": [_digest(secret) for secret, _ in tokens], "kinds": [kind.value for _, kind in tokens]}
    numbers = database.sql(
        "SELECT g.number FROM unnest(CAST(:digests AS text[]), CAST(:kinds AS text[])) WITH ORDINALITY"
        " AS g(digest, kind, number) WHERE NOT EXISTS (SELECT FROM user_tokens WHERE token_sha256 = g.digest"
        " AND kind = g.kind AND (expires_at IS NULL OR expires_at > clock_timestamp()))",
        values,
    ).scalars()
    return {tokens[number - 1] for number in numbers}


def take_link(database: Database, secret: str) -> UserToken | None:
    """Uses a one-time link up. None: it was used, has lapsed, or does not exist."""
    values = {"digest": _digest(secret), "kinds": [TokenKind.LINK.value]}
    row = database.sql(f"DELETE FROM user_tokens WHERE {_VALID} RETURNING *", values).first()  # noqa: S608
    return None if row is None else _token(row)


def owner_link(database: Database) -> str:
    """Creates a one-time link that signs the installation's owner in as an administrator; returns its secret."""
    return add_token(database, OWNER, Scope.ADMINISTER, kind=TokenKind.LINK, expires_s=LINK_S)[0]


def all_tokens(database: Database) -> list[UserToken]:
    """Returns all valid tokens and sessions, without links; by user, then by age."""
    rows = database.sql(
        "SELECT * FROM user_tokens WHERE kind <> 'link'"
        " AND (expires_at IS NULL OR expires_at > clock_timestamp()) ORDER BY user_name, created_at"
    )
    return [_token(row) for row in rows]


def revoke(database: Database, user_name: str, token: str = "") -> int:
    """Deletes a user's tokens and sessions, or the token whose id ends in `token` and its sessions; returns how many.

    Raises: UnknownName.
    """
    with database.begin() as connection:
        count = sql(
            connection,
            "DELETE FROM user_tokens WHERE user_name = :user AND (right(id::text, length(:token)) = :token"
            " OR kind = 'session' AND right(label, length(:token)) = :token)",
            {"user": user_name, "token": token},
        ).rowcount
        if not count:
            known = sql(connection, "SELECT DISTINCT user_name FROM user_tokens").scalars()
            raise UnknownName.of("user with such a token" if token else "user with a token", user_name, list(known))
    return count


def end_session(database: Database, secret: str) -> None:
    """Signs a browser out."""
    values = {"digest": _digest(secret)}
    database.sql("DELETE FROM user_tokens WHERE token_sha256 = :digest AND kind = 'session'", values)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _token(row: Row[Any]) -> UserToken:
    fields = {name: value for name, value in row._asdict().items() if name != "token_sha256"}
    scopes = frozenset(Scope(one) for one in row.scopes)
    return UserToken(**{**fields, "kind": TokenKind(row.kind), "scopes": scopes})


@dataclass(frozen=True, slots=True)
class UserAction:
    """An action of a user through the web server, or of a machine's account by a command."""

    at: datetime
    user_name: str
    action: str  # noun.verb, as events
    subject: str  # the id of a run or task, the name of a limit, …
    reason: str
    data: dict[str, Any]


def record_action(
    database: Database, user_name: str, action: str, subjects: Sequence[str], reason: str = "", **data: Any
) -> None:
    """Records an action of a user on each of at least one subject."""
    values = {"user_name": user_name, "action": action, "reason": reason[:1000], "data": data}
    database.sql(insert(UserActionRow), [values | {"subject": one[:200]} for one in subjects])


def others_paused(database: Database, run_id: UUID, user_name: str) -> bool:
    """Whether another user paused the run since it was last resumed, by the log of actions."""
    statement = (
        "SELECT 1 FROM user_actions a JOIN pauses p ON p.kind = 'run' AND p.name = a.subject AND a.at >= p.since"
        " WHERE a.subject = :run AND a.action = 'run.paused' AND a.user_name <> :user"
    )
    return database.sql(statement, {"run": str(run_id), "user": user_name}).first() is not None


def actions(database: Database, *, subjects: Iterable[str] | None = None, limit: int = 200) -> Sequence[UserAction]:
    """Returns recorded actions, the newest first; all, or those on some subjects."""
    chosen = None if subjects is None else list(subjects)
    rows = database.sql(
        "SELECT at, user_name, action, subject, reason, data FROM user_actions"
        " WHERE CAST(:subjects AS text[]) IS NULL OR subject = ANY(CAST(:subjects AS text[]))"
        " ORDER BY id DESC LIMIT :limit",
        {"subjects": chosen, "limit": limit},
    )
    return [UserAction(**row._asdict()) for row in rows]
