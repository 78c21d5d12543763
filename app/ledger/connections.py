"""Finds connected standing instances: each holds an advisory lock, which ends with its connection.

A lease detects a silent host. This lock shows within seconds that an instance's processes have ended.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from uuid import UUID

import structlog

from app.errors import DatabaseUnavailable
from app.ledger.database import Database, Leadership, sql

log = structlog.get_logger()

_POLL_S = 0.5
_LOOKS = 2
"""Checks in a row at which a formerly connected instance must be missing before it counts as lost."""
_STARTED_S = 15.0
"""Seconds after the server's start in which missing locks mean nothing: the restart closed all connections."""


@contextmanager
def connected(database: Database, instance_id: UUID, *, silent_s: float) -> Iterator[None]:
    """Shows the instance as connected during the block, from a background thread; reconnects after a lost connection.

    silent_s: seconds of silence after which the server closes the connection.
    """
    stop, lock = threading.Event(), Leadership(database, key_of(instance_id), silent_s)

    def hold() -> None:
        while not stop.is_set():
            try:
                lock.held()
            except DatabaseUnavailable as error:
                log.debug("connections.away", reason=str(error))
            stop.wait(_POLL_S)

    thread = threading.Thread(target=hold, name="connected", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=5)
        lock.release()


def key_of(instance_id: UUID) -> int:
    """Returns an instance's lock key: 30 random bits from the end of its id, above the keys of the named locks."""
    return 1 << 30 | int.from_bytes(instance_id.bytes[-4:]) & (1 << 30) - 1


def locked(database: Database) -> tuple[set[int], bool]:
    """Returns the locks that are held, and whether the server has run long enough for a missing one to mean something.

    Raises: DatabaseUnavailable.
    """
    with database.begin() as connection:
        settled = "SELECT clock_timestamp() - pg_postmaster_start_time() > make_interval(secs => :s)"
        held = (
            "SELECT objid::bigint FROM pg_locks WHERE locktype = 'advisory' AND classid = 0 AND granted"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        return set(sql(connection, held).scalars()), bool(sql(connection, settled, {"s": _STARTED_S}).scalar_one())


class LostConnections:
    """Finds lost instances: remembers between checks which instances were connected."""

    def __init__(self) -> None:
        self._missing: dict[UUID, int] = {}  # by instance: checks in a row without its lock

    def look(self, live: Collection[UUID], held: Collection[int], *, settled: bool = True) -> list[UUID]:
        """Returns the live instances that are lost now. held, settled: as in `locked`."""
        here = {one for one in live if key_of(one) in held}
        known = {
            one: looks + 1 if settled and one not in here else 0 for one, looks in self._missing.items() if one in live
        }
        self._missing = dict.fromkeys(here, 0) | known
        return [one for one, looks in self._missing.items() if looks >= _LOOKS]
