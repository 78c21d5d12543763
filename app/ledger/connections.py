"""Finds connected standing instances: each holds an advisory lock, which ends with its connection.

The lease notices a host that falls silent; this notices one whose processes are gone within seconds.
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
"""An instance that was connected and is missing at as many looks in a row is lost."""
_STARTED_S = 15.0
"""A server that started a moment ago has closed every connection: nothing follows from it."""


@contextmanager
def connected(database: Database, instance_id: UUID, *, silent_s: float) -> Iterator[None]:
    """Be seen as connected for the block, in the background; a connection that was lost is made anew.

    silent_s: after that long without a word the server takes the connection for lost.
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
    """Returns the lock of an instance: 31 bits of the random end of its id, above the locks with names."""
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
    """Remembers from look to look which instances were connected."""

    def __init__(self) -> None:
        self._missing: dict[UUID, int] = {}  # those that were connected: at how many looks in a row they were not

    def look(self, live: Collection[UUID], held: Collection[int], *, settled: bool = True) -> list[UUID]:
        """Returns the live instances that are lost now. held, settled: as in `locked`."""
        here = {one for one in live if key_of(one) in held}
        known = {
            one: looks + 1 if settled and one not in here else 0 for one, looks in self._missing.items() if one in live
        }
        self._missing = dict.fromkeys(here, 0) | known
        return [one for one, looks in self._missing.items() if looks >= _LOOKS]
