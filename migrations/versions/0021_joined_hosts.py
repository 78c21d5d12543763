"""Hosts that joined by a token, and the tokens."""

from alembic import op

revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    op.execute("""
        CREATE TABLE joined_hosts (
            id uuid PRIMARY KEY,
            name text NOT NULL,
            account text NOT NULL UNIQUE,
            broker_sha256 text NOT NULL,
            secret_sha256 text NOT NULL UNIQUE,
            instance_id uuid,
            joined_at timestamptz NOT NULL DEFAULT clock_timestamp(),
            left_at timestamptz
        )""")
    op.execute("CREATE UNIQUE INDEX joined_hosts_name_key ON joined_hosts (name) WHERE left_at IS NULL")
    op.execute("""
        CREATE TABLE join_tokens (
            token_sha256 text PRIMARY KEY,
            host_name text NOT NULL DEFAULT '',
            instance_id uuid,
            created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
            expires_at timestamptz NOT NULL,
            used_at timestamptz
        )""")
