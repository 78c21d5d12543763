"""PostgreSQL restarted, killed, its sessions ended, half-open, out of connections."""

from __future__ import annotations

import time

from app.models.spec import Mode
from tests.chaos.case import case
from tests.chaos.fixture import Fixture
from tests.chaos.load import A_SECOND, under_load
from tests.chaos.work import Work


@case("postgres-kill")
def postgres_kill(fixture: Fixture) -> None:
    """SIGKILL to the postmaster under load, twice: what was committed is there, what was not is done again."""
    under_load(fixture)
    for _ in range(2):
        fixture.struck("postgres SIGKILL")
        fixture.servers.kill_postgres()
        fixture.servers.start_postgres()
        time.sleep(3)


@case("postgres-away-for-two-leases", within_s=120)
def postgres_away(fixture: Fixture) -> None:
    """PostgreSQL is away for longer than two leases: workers stop their own work in time, and all runs again."""
    under_load(fixture, 5, Work(seconds=4.0, max_attempts=4))
    fixture.struck("postgres away")
    fixture.servers.stop_postgres()
    time.sleep(7)
    fixture.servers.start_postgres()


@case("postgres-sessions-ended")
def postgres_sessions_ended(fixture: Fixture) -> None:
    """pg_terminate_backend of random sessions, ten times a second for ten seconds."""
    under_load(fixture)
    for _ in range(100):
        if fixture.servers.end_sessions(fixture.database_name, 0.2):
            fixture.struck("sessions ended")
        time.sleep(0.1)


@case("postgres-half-open", relays=("postgres",), within_s=150)
def postgres_half_open(fixture: Fixture) -> None:
    """Every connection to PostgreSQL goes silent without closing: workers, launcher and control must notice by
    themselves; agents of lapsed leases do not go on beside their successors."""
    under_load(fixture, 5, Work(seconds=6.0))
    assert fixture.postgres_relay is not None
    fixture.struck("postgres half-open")
    fixture.postgres_relay.freeze()


@case("postgres-connections-used-up", settings={"ephemeral_capacity": 12})
def connections_used_up(fixture: Fixture) -> None:
    """A server with room for a third of the connections wanted: everybody waits and tries again, nothing is lost."""
    fixture.servers.stop_postgres()
    fixture.servers.start_postgres("max_connections=16", "superuser_reserved_connections=2", "max_wal_senders=0")
    fixture.struck("few connections")
    fixture.start(within_s=120)
    fixture.submit(24, mode=Mode.EPHEMERAL, name="e")
    fixture.submit(12, mode=Mode.PERSISTENT, work=A_SECOND, name="p")
    if not fixture.wait(90):
        fixture.notes.append("not done in 90 s with few connections; the server was given more")
    fixture.servers.stop_postgres()
