"""PostgreSQL restarted, killed, its sessions ended, half-open, out of connections."""

from __future__ import annotations

import time

from app.models.spec import Mode
from tests.chaos.case import case
from tests.chaos.ground import Ground
from tests.chaos.load import A_SECOND, under_load
from tests.chaos.work import Work


@case("postgres-kill")
def postgres_kill(ground: Ground) -> None:
    """SIGKILL to the postmaster under load, twice: what was committed is there, what was not is done again."""
    under_load(ground)
    for _ in range(2):
        ground.struck("postgres SIGKILL")
        ground.servers.kill_postgres()
        ground.servers.start_postgres()
        time.sleep(3)


@case("postgres-away-for-two-leases", within_s=120)
def postgres_away(ground: Ground) -> None:
    """PostgreSQL is away for longer than two leases: workers stop their own work in time, and all runs again."""
    under_load(ground, 5, Work(seconds=4.0, max_attempts=4))
    ground.struck("postgres away")
    ground.servers.stop_postgres()
    time.sleep(7)
    ground.servers.start_postgres()


@case("postgres-sessions-ended")
def postgres_sessions_ended(ground: Ground) -> None:
    """pg_terminate_backend of random sessions, ten times a second for ten seconds."""
    under_load(ground)
    for _ in range(100):
        if ground.servers.end_sessions(ground.database_name, 0.2):
            ground.struck("sessions ended")
        time.sleep(0.1)


@case("postgres-half-open", relays=("postgres",), within_s=150)
def postgres_half_open(ground: Ground) -> None:
    """Every connection to PostgreSQL goes silent without closing: workers, launcher and control must notice by
    themselves; agents of lapsed leases do not go on beside their successors."""
    under_load(ground, 5, Work(seconds=6.0))
    assert ground.postgres_relay is not None
    ground.struck("postgres half-open")
    ground.postgres_relay.freeze()


@case("postgres-connections-used-up", settings={"ephemeral_capacity": 12})
def connections_used_up(ground: Ground) -> None:
    """A server with room for a third of the connections wanted: everybody waits and tries again, nothing is lost."""
    ground.servers.stop_postgres()
    ground.servers.start_postgres("max_connections=16", "superuser_reserved_connections=2", "max_wal_senders=0")
    ground.struck("few connections")
    ground.start(within_s=120)
    ground.submit(24, mode=Mode.EPHEMERAL, name="e")
    ground.submit(12, mode=Mode.PERSISTENT, work=A_SECOND, name="p")
    if not ground.wait(90):
        ground.notes.append("not done in 90 s with few connections; the server was given more")
    ground.servers.stop_postgres()
