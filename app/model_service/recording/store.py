"""Writes batches of calls to the ledger: each message of an attempt once, no call kept out by another one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol
from uuid import UUID

import structlog
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, NotSupportedError, ProgrammingError, StatementError

from app.ledger import model_calls
from app.ledger.database import Database
from app.ledger.model_calls import NewCall
from app.model_service.recording.rows import CountedExchange, WrittenDigests, bare_row_of, row_of

log = structlog.get_logger()


class CallStore(Protocol):
    """Where the writer's thread puts its batches. Only that thread calls `write`."""

    def write(self, batch: Sequence[CountedExchange], forgotten: Iterable[UUID]) -> None:
        """Return when all calls of the batch are kept. A call that is written twice is kept once.

        forgotten: attempts that have ended since the last batch.
        Raises: DatabaseUnavailable, or another error that no call has caused: the batch is to be written again.
        """

    def close(self) -> None:
        """Nothing more is written; another thread's `write` ends soon."""


class LedgerStore:
    """Packs calls and writes them, in this process."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known = WrittenDigests()

    def write(self, batch: Sequence[CountedExchange], forgotten: Iterable[UUID]) -> None:
        for attempt_id in forgotten:
            self._known.forget(attempt_id)
        rows: list[NewCall] = []
        known: dict[UUID, set[str]] = {}
        for one in batch:
            attempt_id = one.exchange.session.attempt_id
            if attempt_id not in known:
                known[attempt_id] = set(self._known.of(attempt_id))
            row = _row(one, known[attempt_id])
            known[attempt_id].update(row.messages)
            rows.append(row)
        try:
            self._store(rows)
        except StatementError as error:
            if not _is_call_error(error):
                raise
            log.error("recorder.batch_refused", calls=len(rows), error=str(error)[:500])
            self._one_by_one(batch)
            return
        for row in rows:
            self._known.written(row)

    def close(self) -> None:
        """The database belongs to the caller."""

    def _store(self, rows: Sequence[NewCall]) -> None:
        with self._database.begin() as connection:
            model_calls.store(connection, rows)

    def _one_by_one(self, batch: Sequence[CountedExchange]) -> None:
        """A call that the ledger does not take must not keep the others out."""
        for one in batch:
            for row in (_row(one, set()), bare_row_of(one, "the ledger did not take what was said")):
                try:
                    self._store([row])
                    break
                except StatementError as error:
                    if not _is_call_error(error):
                        raise
                    log.error("recorder.call_refused", call=str(one.exchange.id), error=str(error)[:500])


def _is_call_error(error: StatementError) -> bool:
    """Whether the ledger did not take what a call says; all else passes, and the call is written then."""
    if isinstance(error, ProgrammingError):  # of the server: a table is being changed; else what cannot be sent to it
        return getattr(error.orig, "sqlstate", None) is None
    return not isinstance(error, DBAPIError) or isinstance(error, (DataError, IntegrityError, NotSupportedError))


def _row(counted: CountedExchange, known: set[str]) -> NewCall:
    try:
        return row_of(counted, known)
    except Exception as error:
        log.exception("recorder.unreadable", call=str(counted.exchange.id))
        return bare_row_of(counted, f"could not be read: {error}"[:300])
