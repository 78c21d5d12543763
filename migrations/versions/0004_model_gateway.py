"""Who may call models, where models are, what was said and what it cost."""

from alembic import op

revision = "0004"
down_revision = "0003"

_CHANGES = """
CREATE TABLE model_sessions (
    attempt_id uuid PRIMARY KEY REFERENCES attempts (id),
    token_sha256 text NOT NULL UNIQUE,
    opened_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    closed_at timestamptz
);
CREATE TABLE model_calls (
    id uuid PRIMARY KEY,
    attempt_id uuid NOT NULL,
    task_id uuid NOT NULL,
    run_id uuid NOT NULL,
    user_name text NOT NULL,
    dialect text NOT NULL,
    model text NOT NULL,
    upstream_model text NOT NULL,
    replica text NOT NULL,
    policy_version text NOT NULL,
    started_at timestamptz NOT NULL,
    first_byte_s double precision,
    duration_s double precision NOT NULL,
    waited jsonb NOT NULL DEFAULT '{}',
    retries integer NOT NULL DEFAULT 0,
    streamed boolean NOT NULL,
    status integer,
    end_kind text NOT NULL,
    detail text NOT NULL DEFAULT '',
    finish_reason text NOT NULL DEFAULT '',
    is_turn boolean NOT NULL,
    offers_tools boolean NOT NULL DEFAULT false,
    prompt_tokens integer,
    completion_tokens integer,
    cached_tokens integer,
    reasoning_tokens integer,
    cost_usd double precision,
    messages text[] NOT NULL,
    reply text,
    body bytea NOT NULL
);
CREATE INDEX model_calls_attempt_id_started_at_idx ON model_calls (attempt_id, started_at);
CREATE INDEX model_calls_run_id_idx ON model_calls (run_id);
CREATE INDEX model_calls_user_name_started_at_idx ON model_calls (user_name, started_at);
CREATE TABLE model_messages (
    attempt_id uuid NOT NULL,
    digest text NOT NULL,
    body bytea NOT NULL,
    PRIMARY KEY (attempt_id, digest)
);
CREATE TABLE model_replicas (
    id uuid PRIMARY KEY,
    model text NOT NULL,
    url text NOT NULL,
    upstream_model text,
    policy_version text NOT NULL DEFAULT '',
    dialects text[] NOT NULL,
    api_key_env text,
    context_tokens integer,
    state text NOT NULL DEFAULT 'active',
    added_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX model_replicas_model_idx ON model_replicas (model);

ALTER TABLE runs ADD COLUMN budget_usd double precision; -- of model calls, all tasks together
CREATE INDEX runs_budget_idx ON runs (id) WHERE budget_usd IS NOT NULL;
"""


def upgrade() -> None:
    op.execute(_CHANGES)
