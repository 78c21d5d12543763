"""Hosts make no environments ahead any more: what they said of that goes."""

from alembic import op

revision = "0011"
down_revision = "0010"

_CHANGES = """
ALTER TABLE hosts DROP COLUMN launches;
ALTER TABLE hosts DROP COLUMN ready;
"""


def upgrade() -> None:
    op.execute(_CHANGES)
