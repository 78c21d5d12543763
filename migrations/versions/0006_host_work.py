"""What a host says of itself: whether instances are started from it, and how many environments it keeps ready."""

from alembic import op

revision = "0006"
down_revision = "0005"

_CHANGES = """
ALTER TABLE hosts ADD COLUMN launches boolean NOT NULL DEFAULT false; -- the dispatcher that decides is there
ALTER TABLE hosts ADD COLUMN ready integer NOT NULL DEFAULT 0; -- made ahead, waiting for a task
"""


def upgrade() -> None:
    op.execute(_CHANGES)
