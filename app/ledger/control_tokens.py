"""Tokens that prove to a gateway that its caller may write to this database. Each is good once, for a minute."""

from __future__ import annotations

import secrets

from sqlalchemy import text

from app.ledger.database import Database
from app.ledger.model_sessions import digest_of

_EXPIRED = text("DELETE FROM control_tokens WHERE expires_at < clock_timestamp()")
_ADD = text("INSERT INTO control_tokens VALUES (:digest, clock_timestamp() + interval '1 minute')")
_USE = text(
    "DELETE FROM control_tokens WHERE token_sha256 = :digest AND expires_at > clock_timestamp() RETURNING token_sha256"
)


def new_token(database: Database) -> str:
    """Raises: DatabaseUnavailable."""
    token = f"mfc-{secrets.token_urlsafe(32)}"
    with database.begin() as connection:
        connection.execute(_EXPIRED)
        connection.execute(_ADD, {"digest": digest_of(token)})
    return token


def use_token(database: Database, token: str) -> bool:
    """Whether the token was good; it is not any more. Raises: DatabaseUnavailable."""
    with database.begin() as connection:
        return connection.execute(_USE, {"digest": digest_of(token)}).first() is not None
