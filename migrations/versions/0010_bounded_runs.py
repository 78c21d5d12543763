"""The most attempts of a run at once; its tasks are marked, so that they are found without reading the others."""

from alembic import op

revision = "0010"
down_revision = "0009"

_CHANGES = """
ALTER TABLE runs ADD COLUMN max_running integer CHECK (max_running > 0); -- NULL: not bounded
ALTER TABLE tasks ADD COLUMN bounded boolean NOT NULL DEFAULT false; -- its run is
CREATE INDEX tasks_bounded_line_idx ON tasks (run_id, requested_mode, resource_class, user_name)
    WHERE bounded AND state = 'pending' AND in_line;
CREATE INDEX tasks_bounded_live_idx ON tasks (run_id) WHERE bounded AND state IN ('admitted', 'running');
"""


def upgrade() -> None:
    op.execute(_CHANGES)
