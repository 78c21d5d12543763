"""A run says which datasets its tasks are from, at which revision and content, and how they were chosen."""

from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.execute("ALTER TABLE runs ADD COLUMN provenance jsonb")
