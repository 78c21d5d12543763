"""How short hosts are of CPU and memory, and how full engines are."""

from alembic import op

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    op.execute("""
        ALTER TABLE hosts ADD COLUMN cores integer, ADD COLUMN cpu_pressure double precision,
            ADD COLUMN memory_available double precision, ADD COLUMN pressure_at timestamptz
    """)
    op.execute("""
        CREATE TABLE engine_loads (
            gateway text NOT NULL,
            url text NOT NULL,
            models text[] NOT NULL,
            inside integer NOT NULL,
            waiting integer NOT NULL,
            queued integer NOT NULL,
            refused integer NOT NULL,
            kv_use double precision,
            at timestamptz NOT NULL DEFAULT clock_timestamp(),
            PRIMARY KEY (gateway, url)
        )
    """)
