"""Writes calls in a process beside the gateway: packing them would take the interpreter from the calls under way.

The gateway keeps a batch until this process has confirmed it. A process that dies is started again and gets the batch
again; the ledger keeps a call once, however often it is written.

    python -m app.model_service.recording.process FD     (FD: one end of a pair of sockets)

The first message is the ledger's URL and the log level. Then come batches: ended attempts and a number, then as many
calls. The answer to a batch is None, or why it was not written. The process ends when the other end closes.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Iterable, Sequence
from typing import BinaryIO, Protocol
from uuid import UUID

import structlog
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, NotSupportedError, ProgrammingError, StatementError

from app import logs
from app.errors import DatabaseUnavailable
from app.ledger import model_calls
from app.ledger.database import Database
from app.ledger.model_calls import NewCall
from app.model_service.recording.rows import CountedExchange, WrittenDigests, bare_row_of, row_of
from app.models.provider_keys import without_keys


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


log = structlog.get_logger()

_ANSWER_S = 90.0
"""A process that says nothing for this long is ended. The ledger itself is given up earlier."""
_END_S = 5.0
_NICE = 5
"""The gateway's calls go before their record."""


class StoreProcess:
    """A `CallStore` whose work is done by a child process, which is started at once and whenever it has died."""

    def __init__(
        self,
        database_url: str,
        *,
        log_level: str = "INFO",
        answer_s: float = _ANSWER_S,
        key_variables: Collection[str] = (),
    ) -> None:
        """answer_s: seconds that the process may take for one batch. key_variables: it does not get these, either."""
        self._key_variables = key_variables
        self._greeting = pickle.dumps((database_url, log_level))
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self._closed = False
        self._start()

    @property
    def pid(self) -> int:
        """Of the process at this moment."""
        return self._process.pid

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "app.model_service.recording.process", str(theirs.fileno())]
            self._process = subprocess.Popen(  # noqa: S603  our own words
                command,
                env=without_keys(os.environ, self._key_variables),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        ours.settimeout(self._answer_s)
        self._socket, self._answers = ours, ours.makefile("rb")
        self._greeted = False

    def write(self, batch: Sequence[CountedExchange], forgotten: Iterable[UUID]) -> None:
        """Raises: DatabaseUnavailable: it was not written, or the process has ended; another one takes its place."""
        try:
            if not self._greeted:
                self._socket.sendall(self._greeting)
                self._greeted = True
            # One call after the other: a large batch in one piece would keep the interpreter for as long.
            said = [pickle.dumps((tuple(forgotten), len(batch))), *(pickle.dumps(one) for one in batch)]
            self._socket.sendall(b"".join(said))
            fault: str | None = pickle.load(self._answers)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            self._again(f"{type(error).__name__}: {error}")
            raise DatabaseUnavailable("the process that writes calls has ended; it is started again") from error
        if fault is not None:
            raise DatabaseUnavailable(fault)

    def _again(self, why: str) -> None:
        with self._lock:
            self._end()
            if not self._closed:
                log.warning("recorder.process_restarted", why=why, exit_code=self._process.returncode)
                self._start()

    def close(self) -> None:
        """The process ends; one that is in the middle of a batch is not waited for long."""
        with self._lock:
            self._closed = True
            self._socket.shutdown(socket.SHUT_WR)
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                log.warning("recorder.process_killed", pid=self._process.pid)
            self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._answers.close()
        self._socket.close()


def main() -> None:
    """Write what comes until the other end closes."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the gateway says when it is over, also to a whole group of processes
    os.nice(_NICE)
    with socket.socket(fileno=int(sys.argv[1])) as connection, connection.makefile("rb") as batches:
        try:
            url, level = pickle.load(batches)
        except EOFError:
            return
        logs.configure(level)
        database = Database(url, pool_size=1)
        try:
            _serve(connection, batches, LedgerStore(database))
        except (EOFError, ConnectionError):
            log.debug("recorder.process_ended")
        finally:
            database.close()


def _serve(connection: socket.socket, batches: BinaryIO, store: LedgerStore) -> None:
    """Raises: EOFError, ConnectionError: the other end has closed."""
    while True:
        forgotten, calls = pickle.load(batches)
        batch = [pickle.load(batches) for _ in range(calls)]
        fault: str | None = None
        try:
            store.write(batch, forgotten)
        except DatabaseUnavailable as error:
            fault = str(error)
        except Exception as error:  # it is written again
            log.exception("recorder.write_failed")
            fault = f"expected the ledger to take calls, found {type(error).__name__}: {error}"
        connection.sendall(pickle.dumps(fault))


if __name__ == "__main__":
    main()
