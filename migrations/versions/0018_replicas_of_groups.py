"""Replicas that their group no longer needs end as superseded."""

from alembic import op

revision = "0018"
down_revision = "0017"

_CHANGES = """
CREATE INDEX tasks_superseded_idx ON tasks (cancel_requested_at)
    WHERE cancel_reason = 'superseded' AND state IN ('admitted', 'running');
"""


def upgrade() -> None:
    op.execute(_CHANGES)
