"""Tables and a column get the names that the field uses; what they hold stays."""

from alembic import op

revision = "0012"
down_revision = "0011"

_CHANGES = """
ALTER TABLE holds RENAME TO semaphore_holders;
ALTER TABLE semaphore_holders RENAME CONSTRAINT holds_pkey TO semaphore_holders_pkey;
ALTER INDEX holds_attempt_id_idx RENAME TO semaphore_holders_attempt_id_idx;

ALTER TABLE engine_objects RENAME TO created_resources;
ALTER TABLE created_resources RENAME CONSTRAINT engine_objects_pkey TO created_resources_pkey;
ALTER INDEX engine_objects_run_id_idx RENAME TO created_resources_run_id_idx;
ALTER INDEX engine_objects_standing_idx RENAME TO created_resources_standing_idx;

ALTER TABLE attempts RENAME COLUMN hint_host TO queue_host;
"""


def upgrade() -> None:
    op.execute(_CHANGES)
