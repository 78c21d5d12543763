"""Users of the web server: their tokens, and what they did."""

from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    op.execute("""
        CREATE TABLE user_tokens (
            id uuid PRIMARY KEY,
            token_sha256 text NOT NULL UNIQUE,
            user_name text NOT NULL,
            kind text NOT NULL,
            scopes text[] NOT NULL,
            label text NOT NULL DEFAULT '',
            created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
            expires_at timestamptz,
            used_at timestamptz
        )""")
    op.execute("CREATE INDEX user_tokens_user_name_idx ON user_tokens (user_name)")
    op.execute("""
        CREATE TABLE user_actions (
            id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            at timestamptz NOT NULL DEFAULT clock_timestamp(),
            user_name text NOT NULL,
            action text NOT NULL,
            subject text NOT NULL,
            reason text NOT NULL DEFAULT '',
            data jsonb NOT NULL DEFAULT '{}'
        )""")
    op.execute("CREATE INDEX user_actions_subject_idx ON user_actions (subject)")
