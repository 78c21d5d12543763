"""Stores sessions of the gateway: the attempt that a token belongs to. Only a token's digest is stored."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection
from uuid import UUID

from sqlalchemy import Connection, text

from app.errors import StaleWriter
from app.ledger.attempts import Claim
from app.ledger.database import Database
from app.models.model_calls import ModelSession
from app.models.spec import ModelChoice, TaskSpec

_OPEN = text("""
INSERT INTO model_sessions (attempt_id, token_sha256)
SELECT id, :digest FROM attempts WHERE id = :id AND number = :number AND state = 'running'
ON CONFLICT (attempt_id) DO UPDATE SET token_sha256 = excluded.token_sha256, opened_at = clock_timestamp(),
    closed_at = NULL
""")
_FIND = text("""
SELECT a.id, a.number, a.state, t.id AS task_id, t.run_id, t.user_name, t.agent, t.name, t.replica, s.body,
    m.closed_at
FROM model_sessions m JOIN attempts a ON a.id = m.attempt_id JOIN tasks t ON t.id = a.task_id
JOIN specs s ON s.digest = t.spec_digest WHERE m.token_sha256 = :digest
""")
_CLOSE = text("UPDATE model_sessions SET closed_at = clock_timestamp() WHERE attempt_id = :id AND closed_at IS NULL")
_LIVE = text("""
SELECT m.token_sha256 FROM model_sessions m JOIN attempts a ON a.id = m.attempt_id
WHERE m.token_sha256 = ANY(CAST(:digests AS text[])) AND a.state = 'running' AND m.closed_at IS NULL
""")
# Attempts taken away from their workers: calls that end a moment later are charged, too.
_SETTLE = text("""
WITH lost AS (
    SELECT a.id, a.user_name, coalesce(a.cost_usd, 0) AS had
    FROM model_sessions m JOIN attempts a ON a.id = m.attempt_id
    WHERE m.closed_at IS NULL AND a.state <> 'running'
        AND a.finished_at < clock_timestamp() - make_interval(secs => :after_s)
    ORDER BY a.id LIMIT :most FOR UPDATE OF m, a SKIP LOCKED
), spent AS (
    SELECT l.*, (SELECT sum(c.cost_usd) FROM model_calls c WHERE c.attempt_id = l.id) AS cost FROM lost l
), noted AS (
    UPDATE attempts a SET cost_usd = s.cost FROM spent s WHERE a.id = s.id AND s.cost > s.had
    RETURNING a.user_name, s.cost - s.had AS more
), charged AS (
    INSERT INTO accounts (user_name, spent_usd) SELECT user_name, sum(more) FROM noted GROUP BY user_name
    ORDER BY user_name
    ON CONFLICT (user_name) DO UPDATE SET spent_usd = accounts.spent_usd + excluded.spent_usd
)
UPDATE model_sessions m SET closed_at = clock_timestamp() FROM lost l WHERE m.attempt_id = l.id
""")


def digest_of(token: str) -> str:
    """Returns the digest under which a token is stored."""
    return hashlib.sha256(token.encode()).hexdigest()


def open_session(database: Database, claimed: Claim, token: str) -> None:
    """Lets the holder of `token` call models for this attempt, until it ends.

    Raises: StaleWriter: the attempt no longer runs under this claim.
    """
    values = {"id": claimed.attempt_id, "number": claimed.number, "digest": digest_of(token)}
    with database.begin() as connection:
        if connection.execute(_OPEN, values).rowcount == 0:
            raise StaleWriter(f"attempt {claimed.attempt_id}: expected it to run as number {claimed.number}")


def close_session(database: Database, attempt_id: UUID) -> None:
    """Stops calls for this attempt at every gateway; its token can still read the account.

    Raises: DatabaseUnavailable.
    """
    database.sql(_CLOSE, {"id": attempt_id})


def settle_lost(database: Database, *, after_s: float = 30.0, most: int = 1000) -> int:
    """Charges users for calls of attempts that ended `after_s` ago without a worker to settle them; returns how many.

    Raises: DatabaseUnavailable.
    """
    with database.begin() as connection:
        return connection.execute(_SETTLE, {"after_s": after_s, "most": most}).rowcount


def session_of(connection: Connection, token: str) -> ModelSession | None:
    """Returns the session of this token; None: unknown."""
    row = connection.execute(_FIND, {"digest": digest_of(token)}).first()
    if row is None:
        return None
    spec = TaskSpec.model_validate_json(row.body)
    return ModelSession(
        attempt_id=row.id,
        number=row.number,
        task_id=row.task_id,
        run_id=row.run_id,
        user=row.user_name,
        agent=row.agent,
        task_name=row.name,
        replica=row.replica,
        model=spec.model or ModelChoice(name=""),
        limits=spec.task.limits,
        live=row.state == "running" and row.closed_at is None,
    )


def live_among(connection: Connection, tokens: Collection[str]) -> set[str]:
    """Returns the tokens whose attempts still run and may call, in one query."""
    by_digest = {digest_of(token): token for token in tokens}
    rows = connection.execute(_LIVE, {"digests": list(by_digest)})
    return {by_digest[row.token_sha256] for row in rows}


_EXPIRED = text("DELETE FROM control_tokens WHERE expires_at < clock_timestamp()")
_ADD = text("INSERT INTO control_tokens VALUES (:digest, clock_timestamp() + interval '1 minute')")
_USE = text(
    "DELETE FROM control_tokens WHERE token_sha256 = :digest AND expires_at > clock_timestamp() RETURNING token_sha256"
)


def new_token(database: Database) -> str:
    """Makes a token, valid once and for a minute: proof for a gateway that its caller may write to this database.

    Raises: DatabaseUnavailable.
    """
    token = f"mfc-{secrets.token_urlsafe(32)}"
    with database.begin() as connection:
        connection.execute(_EXPIRED)
        connection.execute(_ADD, {"digest": digest_of(token)})
    return token


def use_token(database: Database, token: str) -> bool:
    """Returns whether a control token is valid, and uses it up. Raises: DatabaseUnavailable."""
    return database.sql(_USE, {"digest": digest_of(token)}).first() is not None
