"""The machine that used a token up, so that it may ask again when the answer is lost."""

from alembic import op

revision = "0024"
down_revision = "0023"


def upgrade() -> None:
    op.execute("ALTER TABLE join_tokens ADD COLUMN key_sha256 text, ADD COLUMN host_id uuid")
