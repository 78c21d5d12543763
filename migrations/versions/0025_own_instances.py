"""Instances are static where none says otherwise: what a joined host adds without the right to name a provider."""

from alembic import op

revision = "0025"
down_revision = "0024"


def upgrade() -> None:
    op.execute("ALTER TABLE instances ALTER COLUMN provider SET DEFAULT 'static'")
