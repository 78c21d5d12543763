"""Grading in an environment of its own is a stage of its own: the attempt's state `grading`, and who has it."""

from alembic import op

revision = "0015"
down_revision = "0014"

_CHANGES = """
INSERT INTO legal_moves (kind, old, new) VALUES ('attempts', 'running', 'grading'), ('attempts', 'grading', 'finished'),
    ('attempts', 'grading', 'lost'), ('attempts', 'grading', 'cancelled'), ('attempts', 'grading', 'error');
ALTER TABLE tasks ADD COLUMN graded_apart boolean NOT NULL DEFAULT false; -- by a grader, after the agent's end
ALTER TABLE attempts ADD COLUMN graded_apart boolean NOT NULL DEFAULT false;
ALTER TABLE attempts ADD COLUMN gradings integer NOT NULL DEFAULT 0; -- up by one with each claim of it
DROP INDEX attempts_one_live_idx;
CREATE UNIQUE INDEX attempts_one_live_idx ON attempts (task_id) WHERE state IN ('dispatched', 'running', 'grading');
CREATE INDEX attempts_graded_apart_idx ON attempts (resource_class)
    WHERE graded_apart AND state IN ('dispatched', 'running');
CREATE TABLE gradings (
    attempt_id uuid PRIMARY KEY REFERENCES attempts (id),
    number integer NOT NULL,
    resource_class text NOT NULL,
    submission jsonb NOT NULL,
    queued_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    available_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    published_at timestamptz,
    instance_id uuid,
    started_at timestamptz,
    faults integer NOT NULL DEFAULT 0,
    failure jsonb
);
CREATE INDEX gradings_waiting_idx ON gradings (available_at) WHERE instance_id IS NULL;
CREATE INDEX gradings_instance_id_idx ON gradings (instance_id) WHERE instance_id IS NOT NULL;
"""


def upgrade() -> None:
    op.execute(_CHANGES)
