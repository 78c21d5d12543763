"""Training samples are kept in groups, which are leased to a consumer and committed once."""

from alembic import op

revision = "0016"
down_revision = "0015"

_TABLES = """
CREATE TABLE policy_versions (
    policy text NOT NULL,
    number integer NOT NULL CHECK (number >= 0),
    version text NOT NULL,
    state text NOT NULL DEFAULT 'published' CHECK (state IN ('published', 'live', 'refused')),
    detail text NOT NULL DEFAULT '',
    published_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    live_at timestamptz,
    PRIMARY KEY (policy, number),
    UNIQUE (policy, version)
);
CREATE TABLE experience_runs (
    run_id uuid PRIMARY KEY REFERENCES runs (id),
    policy text NOT NULL,
    quorum integer CHECK (quorum > 0),
    drop_equal boolean NOT NULL DEFAULT false,
    allow_scripted boolean NOT NULL DEFAULT false,
    consumer text
);
CREATE TABLE experience_leases (
    id uuid PRIMARY KEY,
    run_id uuid NOT NULL REFERENCES experience_runs (run_id),
    consumer text NOT NULL,
    state text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'committed', 'lapsed')),
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at timestamptz NOT NULL,
    committed_at timestamptz,
    version text
);
CREATE INDEX experience_leases_open_idx ON experience_leases (run_id, expires_at) WHERE state = 'open';
CREATE TABLE experience_groups (
    group_id uuid PRIMARY KEY,
    run_id uuid NOT NULL REFERENCES experience_runs (run_id),
    state text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'ready', 'committed', 'equal', 'stale')),
    oldest integer,
    closed_at timestamptz,
    lease_id uuid REFERENCES experience_leases (id)
);
CREATE INDEX experience_groups_ready_idx ON experience_groups (run_id, closed_at, group_id)
    WHERE state = 'ready' AND lease_id IS NULL;
CREATE INDEX experience_groups_lease_id_idx ON experience_groups (lease_id);
CREATE TABLE experience_attempts (
    attempt_id uuid PRIMARY KEY REFERENCES attempts (id),
    task_id uuid NOT NULL,
    group_id uuid NOT NULL REFERENCES experience_groups (group_id),
    state text NOT NULL CHECK (state IN ('stored', 'nothing')),
    reason text NOT NULL DEFAULT '',
    key text,
    samples integer NOT NULL DEFAULT 0,
    tokens bigint NOT NULL DEFAULT 0,
    trained_tokens bigint NOT NULL DEFAULT 0,
    oldest integer,
    reward double precision,
    stored_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX experience_attempts_group_id_idx ON experience_attempts (group_id);
CREATE UNIQUE INDEX experience_attempts_one_idx ON experience_attempts (task_id) WHERE state = 'stored';
"""


def upgrade() -> None:
    op.execute(_TABLES)
