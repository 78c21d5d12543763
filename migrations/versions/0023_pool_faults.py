"""Recent faults of persistent pools are found without looking at what ended well."""

from alembic import op

revision = "0023"
down_revision = "0022"


def upgrade() -> None:
    op.execute("""
        CREATE INDEX attempts_pool_faults_idx ON attempts (resource_class, finished_at)
            WHERE mode = 'persistent' AND end_reason IN ('infrastructure', 'environment_error', 'lost')
    """)
