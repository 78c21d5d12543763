"""A task's validation on an image is kept: oracle, nop and cheat, with the state that follows."""

from alembic import op

revision = "0014"
down_revision = "0013"

_TABLE = """
CREATE TABLE validations (
    content text NOT NULL,
    image_id text NOT NULL,
    dataset text NOT NULL,
    task text NOT NULL,
    image text NOT NULL,
    state text NOT NULL CHECK (state IN ('candidate', 'built', 'valid', 'quarantined')),
    reason text NOT NULL DEFAULT '',
    details jsonb NOT NULL DEFAULT '{}',
    changed_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (content, image_id)
);
CREATE INDEX validations_task_idx ON validations (task);
"""


def upgrade() -> None:
    op.execute(_TABLE)
