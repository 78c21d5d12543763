"""Tokens by which clients of the database ask gateways for checks."""

from alembic import op

revision = "0007"
down_revision = "0006"

_CHANGES = """
CREATE TABLE control_tokens (
    token_sha256 text PRIMARY KEY,
    expires_at timestamptz NOT NULL
);
"""


def upgrade() -> None:
    op.execute(_CHANGES)
