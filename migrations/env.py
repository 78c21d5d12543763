"""Alembic's entry: runs the migrations against the database of the settings, or the one it is given."""

from alembic import context
from sqlalchemy import create_engine

import app.models.experience_tables
import app.models.service_tables  # noqa: F401  adds its tables
from app.models.tables import Base


def run() -> None:
    url = context.config.attributes.get("url") or _url_of_settings()
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://", 1))
    with engine.connect() as connection:
        context.configure(connection=connection, target_metadata=Base.metadata)
        with context.begin_transaction():
            context.execute("SELECT pg_advisory_xact_lock(7305)")  # two `up` at once migrate one after the other
            context.run_migrations()
    engine.dispose()


def _url_of_settings() -> str:
    from app.settings import load

    return load().database()


run()
