"""The control plane: lines per user, classes, quotas, limits, holds, pauses, the event stream, receipts, webhooks.

Data of the first version is kept: what waited goes on waiting, in the same order.
"""

from alembic import op

revision = "0002"
down_revision = "0001"

_CHANGES = """
-- A task knows what its claim and its place in line need, so that neither reads the spec.
ALTER TABLE runs ADD COLUMN deadline_at timestamptz;
ALTER TABLE tasks
    ADD COLUMN in_line boolean NOT NULL DEFAULT true,
    ADD COLUMN group_started boolean NOT NULL DEFAULT false,
    ADD COLUMN deadline_at timestamptz,
    ADD COLUMN lifetime_s double precision,
    ADD COLUMN cancel_reason text,
    DROP COLUMN idempotency_key,
    DROP CONSTRAINT tasks_run_id_fkey, -- written with the task and never deleted; the check was a third of a load
    DROP CONSTRAINT tasks_spec_digest_fkey;
UPDATE tasks t SET in_line = t.available_at <= clock_timestamp(),
    cancel_reason = CASE WHEN t.cancel_requested_at IS NOT NULL THEN 'cancelled' END,
    lifetime_s = (SELECT (l->>'environment_timeout_s')::float8 + (l->>'agent_timeout_s')::float8
        + (l->>'grading_timeout_s')::float8 + 120 FROM (SELECT s.body->'task'->'limits' AS l FROM specs s
        WHERE s.digest = t.spec_digest) limits);
ALTER TABLE tasks ALTER COLUMN lifetime_s SET NOT NULL;
ALTER TABLE specs ALTER COLUMN body TYPE text;
DROP INDEX tasks_run_id_state_idx;
DROP INDEX tasks_group_id_idx;
DROP INDEX tasks_waiting_idx;
CREATE INDEX tasks_run_id_group_id_idx ON tasks (run_id, group_id);
CREATE INDEX tasks_line_idx ON tasks
    (requested_mode, resource_class, user_name, priority DESC, (attempts > 0) DESC, run_id, group_started DESC, id)
    WHERE state = 'pending' AND in_line;
CREATE INDEX tasks_delayed_idx ON tasks (available_at) WHERE state = 'pending' AND NOT in_line;
CREATE INDEX tasks_deadline_idx ON tasks (deadline_at)
    WHERE deadline_at IS NOT NULL AND state IN ('pending', 'admitted', 'running');

ALTER TABLE attempts
    ADD COLUMN user_name text,
    ADD COLUMN waits jsonb NOT NULL DEFAULT '{}',
    ADD COLUMN cost_usd double precision;
UPDATE attempts a SET user_name = t.user_name FROM tasks t WHERE t.id = a.task_id;
ALTER TABLE attempts ALTER COLUMN user_name SET NOT NULL;
DROP INDEX attempts_instance_id_idx;
CREATE INDEX attempts_instance_id_finished_at_idx ON attempts (instance_id, finished_at);
DROP INDEX attempts_live_idx;
CREATE INDEX attempts_live_idx ON attempts (mode, resource_class, user_name, state)
    WHERE state IN ('dispatched', 'running');

CREATE INDEX attempts_unclaimed_idx ON attempts (mode, resource_class, dispatched_at) WHERE state = 'dispatched';

ALTER TABLE instances ADD COLUMN draining_why text;
DROP INDEX instances_open_idx;
DROP INDEX instances_requested_at_idx;
CREATE INDEX instances_unswept_idx ON instances (ended_at)
    WHERE swept_at IS NULL AND state IN ('terminated', 'failed');
CREATE INDEX instances_stillborn_idx ON instances (requested_at) WHERE state = 'failed';

-- A stream that a reader can follow without missing what commits late.
ALTER TABLE events ADD COLUMN txid bigint NOT NULL DEFAULT 0;
ALTER TABLE events ALTER COLUMN txid SET DEFAULT (pg_current_xact_id()::text)::bigint;
DROP INDEX events_run_id_idx;
CREATE INDEX events_txid_idx ON events (txid);
CREATE INDEX events_seldom_idx ON events (kind, run_id)
    WHERE kind IN ('run.receipt', 'audit.alarm', 'audit.cleared');

-- Where a row stands changes faster than the statistics. Taken while nothing ran, they say that nothing ever runs, and
-- the plans made of them are quadratic in a wave of ten thousand; without them the planner expects a part of the table.
ALTER TABLE attempts ALTER COLUMN state SET STATISTICS 0, ALTER COLUMN state SET (n_distinct = 4),
    SET (fillfactor = 50);
ALTER TABLE tasks ALTER COLUMN state SET STATISTICS 0, ALTER COLUMN state SET (n_distinct = 4),
    ALTER COLUMN group_started SET STATISTICS 0, ALTER COLUMN in_line SET STATISTICS 0;
ALTER TABLE instances ALTER COLUMN state SET STATISTICS 0, ALTER COLUMN state SET (n_distinct = 4);
ALTER TABLE leases SET (fillfactor = 40); -- renewed in place

CREATE TABLE resource_classes (
    name text PRIMARY KEY,
    cpus double precision,
    memory_bytes bigint,
    gpus integer NOT NULL DEFAULT 0,
    architecture text,
    ephemeral_capacity integer,
    ephemeral_provider text,
    persistent_provider text,
    pool_min integer,
    pool_max integer,
    pool_slots integer,
    pool_cooldown_s double precision
);
INSERT INTO resource_classes (name) VALUES ('standard');

CREATE TABLE quotas (
    user_name text PRIMARY KEY,
    weight double precision NOT NULL DEFAULT 1,
    running integer,
    pending integer,
    instances integer,
    spend_usd double precision
);
CREATE TABLE accounts (
    user_name text PRIMARY KEY,
    spent_usd double precision NOT NULL DEFAULT 0,
    since timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE TABLE limits (
    name text PRIMARY KEY,
    capacity double precision NOT NULL,
    set_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE TABLE holds (
    limit_name text NOT NULL,
    holder uuid NOT NULL,
    attempt_id uuid,
    instance_id uuid,
    asked_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    granted_at timestamptz,
    expires_at timestamptz NOT NULL,
    PRIMARY KEY (limit_name, holder)
);
CREATE INDEX holds_attempt_id_idx ON holds (attempt_id);
CREATE TABLE pauses (
    kind text NOT NULL,
    name text NOT NULL,
    since timestamptz NOT NULL DEFAULT clock_timestamp(),
    reason text NOT NULL DEFAULT '',
    PRIMARY KEY (kind, name)
);
CREATE TABLE bindings (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    limit_name text NOT NULL,
    user_name text NOT NULL,
    mode text NOT NULL,
    resource_class text NOT NULL,
    since timestamptz NOT NULL DEFAULT clock_timestamp(),
    until timestamptz
);
CREATE UNIQUE INDEX bindings_open_idx ON bindings (limit_name, user_name, mode, resource_class) WHERE until IS NULL;
CREATE INDEX bindings_user_name_since_idx ON bindings (user_name, since);
CREATE TABLE engine_objects (
    engine_id text PRIMARY KEY,
    kind text NOT NULL,
    run_id uuid NOT NULL,
    task_id uuid NOT NULL,
    attempt_id uuid NOT NULL,
    instance_id uuid,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    destroyed_at timestamptz,
    destroyed_by text
);
CREATE INDEX engine_objects_run_id_idx ON engine_objects (run_id);
CREATE INDEX engine_objects_standing_idx ON engine_objects (instance_id) WHERE destroyed_at IS NULL;
CREATE TABLE webhooks (
    id uuid PRIMARY KEY,
    url text NOT NULL,
    kinds text[] NOT NULL,
    secret_env text,
    position text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    failures integer NOT NULL DEFAULT 0,
    retry_at timestamptz,
    last_error text,
    delivered_at timestamptz
);
"""


def upgrade() -> None:
    op.execute(_CHANGES)
