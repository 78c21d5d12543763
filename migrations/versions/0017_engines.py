"""An engine's kind, and where a version's weights are."""

from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.execute("ALTER TABLE model_replicas ADD COLUMN engine text NOT NULL DEFAULT ''")
    op.execute("ALTER TABLE policy_versions ADD COLUMN weights text")
