"""Writes calls in a separate process: packing them in the gateway would block the interpreter for calls under way.

The gateway keeps a batch until this process has confirmed it. A process that dies is started again and gets the batch
again; the ledger keeps a call once, however often it is written.

    python -m app.model_service.recording.process FD     (FD: one end of a pair of sockets)

The first message is the ledger's URL and the log level. Then come batches: ended attempts and a count, then that many
calls. The answer to a batch is None, or the reason why it was not written. The process ends when the other end closes.
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
    """Destination of the writer thread's batches. Only that thread calls `write`."""

    def write(self, batch: Sequence[CountedExchange], forgotten: Iterable[UUID]) -> None:
        """Writes a batch, and returns when all its calls are stored. A call that is written twice is stored once.

        forgotten: attempts that have ended since the last batch.
        Raises: DatabaseUnavailable, or another error that no call has caused: the batch must be written again.
        """

    def close(self) -> None:
        """Stops writing; a `write` in another thread ends soon."""


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
        """Does nothing: the database belongs to the caller."""

    def _store(self, rows: Sequence[NewCall]) -> None:
        with self._database.begin() as connection:
            model_calls.store(connection, rows)

    def _one_by_one(self, batch: Sequence[CountedExchange]) -> None:
        """Writes calls one by one: a call that the ledger refuses must not block the others."""
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
    """Whether the content of a call caused the error. All other errors are temporary, and the call is written later."""
    if isinstance(error, ProgrammingError):  # with SQLSTATE: a table is being changed; else: not sendable
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
"""Seconds without an answer after which a process is killed. The wait for the ledger itself ends earlier."""
_END_S = 5.0
_NICE = 5
"""Lower priority: the gateway's calls are more urgent than their record."""


class StoreProcess:
    """A `CallStore` that writes in a child process, which is started at once and whenever it has died."""

    def __init__(
        self,
        database_url: str,
        *,
        log_level: str = "INFO",
        answer_s: float = _ANSWER_S,
        key_variables: Collection[str] = (),
    ) -> None:
        """answer_s: seconds that the process may take for one batch. key_variables: variables hidden from it, too."""
        self._key_variables = key_variables
        self._greeting = pickle.dumps((database_url, log_level))
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self._closed = False
        self._start()

    @property
    def pid(self) -> int:
        """Id of the current process."""
        return self._process.pid

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "app.model_service.recording.process", str(theirs.fileno())]
            self._process = subprocess.Popen(  # noqa: S603  fixed arguments
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
        """Raises: DatabaseUnavailable: it was not written, or the process has ended and another one is started."""
        try:
            if not self._greeted:
                self._socket.sendall(self._greeting)
                self._greeted = True
            # Pickles one call after the other: a large batch in one piece would block the interpreter.
            messages = [pickle.dumps((tuple(forgotten), len(batch))), *(pickle.dumps(one) for one in batch)]
            self._socket.sendall(b"".join(messages))
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
        """Ends the process; a batch in progress gets only a few seconds."""
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
    """Writes batches until the other end closes."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the gateway ends it, also when a whole process group gets the signal
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
        except Exception as error:  # the batch is written again
            log.exception("recorder.write_failed")
            fault = f"expected the ledger to take calls, found {type(error).__name__}: {error}"
        connection.sendall(pickle.dumps(fault))


if __name__ == "__main__":
    main()
