"""Migrates the schema, and checks whether that is needed."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine
from sqlalchemy.exc import OperationalError

from app.errors import DatabaseUnavailable, InstallationFailed
from app.ledger import hosts
from app.ledger.database import Database

_ROOT = Path(__file__).resolve().parents[2]


def migrate(database_url: str) -> str | None:
    """Migrates the database to the newest revision and returns its name. Safe to run twice or concurrently.

    Raises: DatabaseUnavailable; InstallationFailed: no migrations folder.
    """
    config = _config()
    config.attributes["url"] = database_url
    try:
        command.upgrade(config, "head")
    except OperationalError as error:
        raise DatabaseUnavailable(f"expected PostgreSQL at the database URL, found: {error.orig}") from error
    hosts.grant_again(Database(database_url, pooled=False))
    return ScriptDirectory.from_config(config).get_current_head()


def at_head(database_url: str) -> bool:
    """Whether nothing is left to migrate. Raises: DatabaseUnavailable."""
    engine = create_engine(database_url.replace("postgresql://", "postgresql+psycopg://", 1))
    try:
        with engine.connect() as connection:
            current = MigrationContext.configure(connection).get_current_revision()
    except OperationalError as error:
        raise DatabaseUnavailable(f"expected PostgreSQL at the database URL, found: {error.orig}") from error
    finally:
        engine.dispose()
    return current == ScriptDirectory.from_config(_config()).get_current_head()


def _config() -> Config:
    ini = _ROOT / "alembic.ini"
    if not ini.exists():
        raise InstallationFailed(f"expected the migrations beside the package ({ini}); run from a source checkout")
    return Config(str(ini))
