"""Rewards are bounded: rows outside become not scored, with what was claimed, and no new one can be written."""

from alembic import op

revision = "0009"
down_revision = "0008"

_REPAIR = """
UPDATE {table} SET verdict = verdict || jsonb_build_object('reward', NULL, 'counts', false, 'metrics', '{{}}'::jsonb,
    'detail', 'not scored: the reward ' || left(verdict->>'reward', 40) || ' is not between -1e6 and 1e6; '
    || coalesce(verdict->>'detail', ''))
WHERE verdict->>'reward' IS NOT NULL AND abs((verdict->>'reward')::numeric) > 1e6;
UPDATE {table} SET verdict = verdict || '{{"metrics": {{}}}}'
WHERE jsonb_typeof(verdict->'metrics') = 'object' AND EXISTS (
    SELECT FROM jsonb_each_text(verdict->'metrics') m WHERE abs(m.value::numeric) > 1e6);
ALTER TABLE {table} ADD CONSTRAINT {table}_reward_check CHECK (
    verdict->>'reward' IS NULL OR abs((verdict->>'reward')::numeric) <= 1e6);
"""


def upgrade() -> None:
    for table in ("attempts", "tasks"):
        op.execute(_REPAIR.format(table=table))
