"""Tasks that come after others: what they wait for, and the files that they get of it."""

from alembic import op

revision = "0020"
down_revision = "0019"

_CHANGES = """
ALTER TABLE tasks ADD COLUMN waits boolean NOT NULL DEFAULT false;
ALTER TABLE tasks ADD COLUMN has_dependents boolean NOT NULL DEFAULT false;
ALTER TABLE tasks ADD CONSTRAINT tasks_waits_check
    CHECK (NOT waits OR NOT in_line AND state NOT IN ('admitted', 'running', 'succeeded'));
DROP INDEX tasks_delayed_idx;
CREATE INDEX tasks_delayed_idx ON tasks (available_at) WHERE state = 'pending' AND NOT in_line AND NOT waits;
CREATE INDEX tasks_waits_idx ON tasks (run_id) WHERE state = 'pending' AND waits;
CREATE INDEX tasks_upstream_ended_idx ON tasks (id)
    WHERE has_dependents AND state IN ('succeeded', 'failed', 'cancelled');
CREATE TABLE task_dependencies (
    run_id uuid NOT NULL,
    on_task uuid NOT NULL REFERENCES tasks (id),
    path text NOT NULL DEFAULT '',
    kind text NOT NULL DEFAULT '',
    PRIMARY KEY (run_id, on_task, path)
);
CREATE INDEX task_dependencies_on_task_idx ON task_dependencies (on_task);
"""


def upgrade() -> None:
    op.execute(_CHANGES)
