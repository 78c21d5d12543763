"""Groups are complete by quorum, their lost replicas are repaired, and what is no longer needed is superseded."""

from alembic import op

revision = "0018"
down_revision = "0017"

_CHANGES = """
ALTER TABLE runs ADD COLUMN quorum integer CHECK (quorum > 0);
ALTER TABLE runs ADD COLUMN hedge_after integer CHECK (hedge_after BETWEEN 1 AND 99);
ALTER TABLE runs ADD COLUMN most_replicas integer CHECK (most_replicas > 0);
ALTER TABLE tasks ADD COLUMN added_for text;
CREATE INDEX tasks_superseded_idx ON tasks (cancel_requested_at)
    WHERE cancel_reason = 'superseded' AND state IN ('admitted', 'running');
ALTER TABLE experience_runs ADD COLUMN max_staleness integer CHECK (max_staleness >= 0);
ALTER TABLE experience_runs ADD COLUMN batch_groups integer;
ALTER TABLE experience_groups ADD COLUMN detail text NOT NULL DEFAULT '';
ALTER TABLE experience_groups DROP CONSTRAINT experience_groups_state_check;
ALTER TABLE experience_groups ADD CONSTRAINT experience_groups_state_check
    CHECK (state IN ('open', 'ready', 'committed', 'equal', 'stale', 'lost'));
CREATE INDEX experience_groups_open_idx ON experience_groups (run_id) WHERE state = 'open';
"""


def upgrade() -> None:
    op.execute(_CHANGES)
