"""Which calls a replay engine answered, which attempts and tasks are scripted for it, and each task's model."""

from alembic import op

revision = "0008"
down_revision = "0007"

# Calls from before are known by their model's name or by the replay engine's default address.
_CHANGES = """
ALTER TABLE model_calls ADD COLUMN scripted boolean NOT NULL DEFAULT false; -- a replay engine answered
ALTER TABLE attempts ADD COLUMN scripted boolean NOT NULL DEFAULT false; -- one of its calls was answered so
ALTER TABLE tasks ADD COLUMN scripted boolean NOT NULL DEFAULT false; -- its graded attempt is
ALTER TABLE tasks ADD COLUMN model text; -- as submitted; NULL: the agent has none

UPDATE model_calls SET scripted = true
WHERE model = 'replay' OR model LIKE 'replay:%' OR model LIKE 'scenario-%' OR replica = 'http://127.0.0.1:8765/v1';
UPDATE attempts SET scripted = true WHERE id IN (SELECT attempt_id FROM model_calls WHERE scripted);
UPDATE tasks t SET scripted = true FROM attempts a
WHERE a.task_id = t.id AND a.number = t.attempts AND a.scripted AND a.verdict IS NOT NULL;
UPDATE tasks t SET model = s.body::jsonb #>> '{model,name}' FROM specs s WHERE s.digest = t.spec_digest;
"""


def upgrade() -> None:
    op.execute(_CHANGES)
