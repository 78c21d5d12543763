"""The first tables, and the triggers that refuse illegal moves.

The moves are written out: a migration is history, and history does not change when `app.models.states` does. A test
holds the newest schema against that module.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None

_MOVES = {
    "tasks": {
        "pending": "admitted cancelled failed",
        "admitted": "running pending cancelled failed",
        "running": "succeeded failed cancelled pending",
        "failed": "pending",
        "cancelled": "pending",
    },
    "attempts": {
        "dispatched": "running lost cancelled interrupted error",
        "running": "finished lost cancelled interrupted error",
    },
    "instances": {
        "requested": "booting ready terminated failed",
        "booting": "ready draining terminated failed",
        "ready": "busy draining terminated failed",
        "busy": "draining terminated failed",
        "draining": "terminated failed",
    },
}

_REFUSE = """
CREATE FUNCTION refuse_illegal_move() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (
        SELECT 1 FROM legal_moves m WHERE m.kind = TG_ARGV[0] AND m.old = OLD.state AND m.new = NEW.state
    ) THEN
        RAISE EXCEPTION '% %: % may not follow %', TG_ARGV[0], NEW.id, NEW.state, OLD.state
            USING ERRCODE = 'MF001';
    END IF;
    RETURN NEW;
END $$
"""


def upgrade() -> None:
    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column(
            "at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=True),
        sa.Column("task_id", sa.Uuid(), nullable=True),
        sa.Column("attempt_id", sa.Uuid(), nullable=True),
        sa.Column("instance_id", sa.Uuid(), nullable=True),
        sa.Column(
            "data",
            postgresql.JSONB(none_as_null=True, astext_type=sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("events_pkey")),
    )
    op.create_index("events_run_id_idx", "events", ["run_id"], unique=False)
    op.create_index("events_task_id_idx", "events", ["task_id"], unique=False)
    op.create_table(
        "instances",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("mode", sa.Text(), nullable=False),
        sa.Column("resource_class", sa.Text(), nullable=False),
        sa.Column("slots", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), server_default="requested", nullable=False),
        sa.Column("handle", sa.Text(), nullable=True),
        sa.Column("attempt_id", sa.Uuid(), nullable=True),
        sa.Column(
            "requested_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("ready_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("ended_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("deadline_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("seen_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("swept_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("instances_pkey")),
        sa.UniqueConstraint("attempt_id", name=op.f("instances_attempt_id_key")),
    )
    op.create_index(
        "instances_open_idx", "instances", ["state"], unique=False, postgresql_where=sa.text("swept_at IS NULL")
    )
    op.create_index("instances_requested_at_idx", "instances", ["requested_at"], unique=False)
    op.create_index(
        "instances_live_idx",
        "instances",
        ["mode", "resource_class"],
        unique=False,
        postgresql_where=sa.text("state NOT IN ('terminated', 'failed')"),
    )
    op.create_table(
        "legal_moves",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("old", sa.Text(), nullable=False),
        sa.Column("new", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("kind", "old", "new", name=op.f("legal_moves_pkey")),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("user_name", sa.Text(), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column(
            "created_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("total", sa.Integer(), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("runs_pkey")),
        sa.UniqueConstraint("user_name", "idempotency_key", name=op.f("runs_user_name_idempotency_key_key")),
    )
    op.create_table(
        "schedules",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("cron", sa.Text(), nullable=False),
        sa.Column("dataset", sa.Text(), nullable=False),
        sa.Column("submission", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=False),
        sa.Column("misfire", sa.Text(), nullable=False),
        sa.Column(
            "created_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("settled_until", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("schedules_pkey")),
        sa.UniqueConstraint("name", name=op.f("schedules_name_key")),
    )
    op.create_table(
        "specs",
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("body", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("specs_pkey")),
    )
    op.create_table(
        "schedule_fires",
        sa.Column("schedule_id", sa.Uuid(), nullable=False),
        sa.Column("due_at", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.Column(
            "fired_at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("run_id", sa.Uuid(), nullable=True),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["schedule_id"], ["schedules.id"], name=op.f("schedule_fires_schedule_id_fkey"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("schedule_id", "due_at", name=op.f("schedule_fires_pkey")),
    )
    op.create_table(
        "tasks",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("group_id", sa.Uuid(), nullable=False),
        sa.Column("replica", sa.Integer(), nullable=False),
        sa.Column("spec_digest", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("agent", sa.Text(), nullable=False),
        sa.Column("user_name", sa.Text(), nullable=False),
        sa.Column("requested_mode", sa.Text(), nullable=False),
        sa.Column("mode", sa.Text(), nullable=True),
        sa.Column("resource_class", sa.Text(), nullable=False),
        sa.Column("priority", sa.Integer(), server_default="0", nullable=False),
        sa.Column("state", sa.Text(), server_default="pending", nullable=False),
        sa.Column(
            "accepted_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column(
            "available_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("faults", sa.Integer(), server_default="0", nullable=False),
        sa.Column("cancel_requested_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("finished_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("end_reason", sa.Text(), nullable=True),
        sa.Column("verdict", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("failure", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("tasks_run_id_fkey")),
        sa.ForeignKeyConstraint(["spec_digest"], ["specs.digest"], name=op.f("tasks_spec_digest_fkey")),
        sa.PrimaryKeyConstraint("id", name=op.f("tasks_pkey")),
        sa.UniqueConstraint("user_name", "idempotency_key", name=op.f("tasks_user_name_idempotency_key_key")),
    )
    op.create_index("tasks_group_id_idx", "tasks", ["group_id"], unique=False)
    op.create_index("tasks_run_id_state_idx", "tasks", ["run_id", "state"], unique=False)
    op.create_index(
        "tasks_waiting_idx",
        "tasks",
        [sa.literal_column("priority DESC"), "accepted_at", "id"],
        unique=False,
        postgresql_where=sa.text("state = 'pending'"),
    )
    op.create_table(
        "attempts",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("task_id", sa.Uuid(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), server_default="dispatched", nullable=False),
        sa.Column("mode", sa.Text(), nullable=False),
        sa.Column("resource_class", sa.Text(), nullable=False),
        sa.Column("instance_id", sa.Uuid(), nullable=True),
        sa.Column(
            "dispatched_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("published_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("claimed_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("finished_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("deadline_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column(
            "phases",
            postgresql.JSONB(none_as_null=True, astext_type=sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
        ),
        sa.Column(
            "environment",
            postgresql.JSONB(none_as_null=True, astext_type=sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
        ),
        sa.Column("end_reason", sa.Text(), nullable=True),
        sa.Column("verdict", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("failure", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.ForeignKeyConstraint(["instance_id"], ["instances.id"], name=op.f("attempts_instance_id_fkey")),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name=op.f("attempts_task_id_fkey")),
        sa.PrimaryKeyConstraint("id", name=op.f("attempts_pkey")),
        sa.UniqueConstraint("task_id", "number", name=op.f("attempts_task_id_number_key")),
    )
    op.create_index("attempts_instance_id_idx", "attempts", ["instance_id"], unique=False)
    op.create_index(
        "attempts_live_idx",
        "attempts",
        ["mode", "resource_class"],
        unique=False,
        postgresql_where=sa.text("state IN ('dispatched', 'running')"),
    )
    op.create_index(
        "attempts_one_live_idx",
        "attempts",
        ["task_id"],
        unique=True,
        postgresql_where=sa.text("state IN ('dispatched', 'running')"),
    )
    op.create_table(
        "artifacts",
        sa.Column("attempt_id", sa.Uuid(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=True),
        sa.Column("url", sa.Text(), nullable=True),
        sa.Column("size_bytes", sa.BigInteger(), nullable=True),
        sa.Column("sha256", sa.Text(), nullable=True),
        sa.Column("missing", sa.Text(), nullable=True),
        sa.Column(
            "stored_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("artifacts_attempt_id_fkey")),
        sa.PrimaryKeyConstraint("attempt_id", "kind", name=op.f("artifacts_pkey")),
    )
    op.create_table(
        "leases",
        sa.Column("attempt_id", sa.Uuid(), nullable=False),
        sa.Column("instance_id", sa.Uuid(), nullable=False),
        sa.Column("expires_at", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("leases_attempt_id_fkey")),
        sa.PrimaryKeyConstraint("attempt_id", name=op.f("leases_pkey")),
    )
    op.execute(_REFUSE)
    for table, moves in _MOVES.items():
        op.bulk_insert(
            sa.table("legal_moves", sa.column("kind"), sa.column("old"), sa.column("new")),
            [{"kind": table, "old": old, "new": new} for old, news in moves.items() for new in news.split()],
        )
        op.execute(
            f"CREATE TRIGGER {table}_refuse_illegal_move BEFORE UPDATE OF state ON {table} FOR EACH ROW"
            f" WHEN (OLD.state IS DISTINCT FROM NEW.state) EXECUTE FUNCTION refuse_illegal_move('{table}')"
        )


def downgrade() -> None:
    op.drop_table("leases")
    op.drop_table("artifacts")
    op.drop_index(
        "attempts_one_live_idx", table_name="attempts", postgresql_where=sa.text("state IN ('dispatched', 'running')")
    )
    op.drop_index(
        "attempts_live_idx", table_name="attempts", postgresql_where=sa.text("state IN ('dispatched', 'running')")
    )
    op.drop_index("attempts_instance_id_idx", table_name="attempts")
    op.drop_table("attempts")
    op.drop_index("tasks_waiting_idx", table_name="tasks", postgresql_where=sa.text("state = 'pending'"))
    op.drop_index("tasks_run_id_state_idx", table_name="tasks")
    op.drop_index("tasks_group_id_idx", table_name="tasks")
    op.drop_table("tasks")
    op.drop_table("schedule_fires")
    op.drop_table("specs")
    op.drop_table("schedules")
    op.drop_table("runs")
    op.drop_table("legal_moves")
    op.drop_index("instances_open_idx", table_name="instances", postgresql_where=sa.text("swept_at IS NULL"))
    op.drop_table("instances")
    op.drop_index("events_task_id_idx", table_name="events")
    op.drop_index("events_run_id_idx", table_name="events")
    op.drop_table("events")
    op.execute("DROP FUNCTION refuse_illegal_move()")
