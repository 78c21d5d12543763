"""Sessions of the gateway that nobody has settled are found without reading all."""

from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.execute("CREATE INDEX model_sessions_open_idx ON model_sessions (attempt_id) WHERE closed_at IS NULL")
