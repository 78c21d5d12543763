"""Connects to PostgreSQL, and listens for its notifications."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from sqlalchemy import Connection, CursorResult, Executable, NullPool, QueuePool, Result, create_engine, event, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from app.errors import DatabaseUnavailable, IllegalMove

ILLEGAL_MOVE = "MF001"
"""SQLSTATE that the triggers raise."""
DEADLOCK = "40P01"
"""SQLSTATE of a writer that PostgreSQL rolled back to resolve a deadlock."""


_PATIENCE: dict[str, Any] = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,  # milliseconds
}
"""Timeouts for a server that does not answer: a half-open connection must not block a worker for hours."""


ANSWER_S = 30.0
"""Seconds without data in the middle of a statement after which a connection is given up, whatever TCP reports."""
_IN_TRANSACTION_S = 30
_LEADER_SILENT_S = 15
"""Seconds until the server drops a silent client: in a transaction, which locks rows, and as the leader."""

_SERVERS_PATIENCE = f"-c idle_in_transaction_session_timeout={_IN_TRANSACTION_S}s"


SqlValues = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None


class _BoundedConnection(psycopg.Connection[Any]):
    """A connection that gives up when the server does not answer in time."""

    answer_s = ANSWER_S

    def wait(self, gen: Any, *args: Any, **named: Any) -> Any:
        try:
            return super().wait(self._bounded(gen), *args, **named)
        except KeyboardInterrupt:
            self.pgconn.finish()  # in the middle of a statement, clean-up would fail and hide the interrupt
            raise

    def _bounded(self, gen: Any) -> Any:
        give_up = time.monotonic() + self.answer_s
        try:
            statement = next(gen)
            while True:
                ready = yield statement
                if not ready and time.monotonic() > give_up:
                    self.pgconn.finish()
                    raise psycopg.OperationalError(f"the server said nothing for {self.answer_s:.0f} s")
                statement = gen.send(ready)
        except StopIteration as end:
            return end.value


def _answers_within(answer_s: float, connection: _BoundedConnection | None) -> None:
    if connection is not None:  # None: it was given up
        connection.answer_s = answer_s


class Database:
    """A PostgreSQL database. Threads may share it.

    `pooled=False` holds no connection between transactions: ten thousand ephemeral workers must not hold ten thousand.
    """

    def __init__(self, url: str, *, pooled: bool = True, pool_size: int = 5, idle_answer_s: float = ANSWER_S) -> None:
        """idle_answer_s: seconds without an answer after which an idle connection is replaced when it is used again."""
        self.url = url
        self._snapshot = threading.local()
        embedded = "?host=/" in url  # the URL of the settings when none was given
        self._remedy = "try `megaflow up`" if embedded else "try `megaflow doctor`"
        options: dict[str, Any] = {
            "connect_args": {"application_name": "megaflow", "options": _SERVERS_PATIENCE, **_PATIENCE}
        }
        sqlalchemy_url = re.sub("^postgres(ql)?://", "postgresql+psycopg://", url)
        if pooled:
            options |= {"pool_size": pool_size, "max_overflow": 5, "pool_timeout": min(ANSWER_S, 2 * idle_answer_s)}
            self.engine = create_engine(sqlalchemy_url, poolclass=QueuePool, pool_pre_ping=True, **options)
            event.listen(self.engine, "checkin", lambda one, _record: _answers_within(idle_answer_s, one))
            event.listen(self.engine, "checkout", lambda one, *_: _answers_within(ANSWER_S, one))
        else:
            self.engine = create_engine(sqlalchemy_url, poolclass=NullPool, **options)
        event.listen(self.engine, "do_connect", lambda _d, _r, args, named: _BoundedConnection.connect(*args, **named))

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """Opens a transaction and commits it at the end of the block. Raises: DatabaseUnavailable, IllegalMove."""
        shared: Connection | None = getattr(self._snapshot, "connection", None)
        if shared is not None:
            yield shared
            return
        try:
            with self.engine.begin() as connection:
                yield connection
        except psycopg.OperationalError as error:  # of the driver itself, which loads in bulk
            raise DatabaseUnavailable(
                f"expected PostgreSQL to answer, found: {_one_line(str(error))}; try again"
            ) from error
        except PoolTimeoutError as error:
            raise DatabaseUnavailable(
                f"expected a free connection to PostgreSQL, found all of them in use: {error}; try again"
            ) from error
        except OperationalError as error:
            if getattr(error.orig, "sqlstate", None) == DEADLOCK:
                raise DatabaseUnavailable(
                    "two writers waited for each other; this one was undone, try again"
                ) from error
            raise DatabaseUnavailable(
                f"expected PostgreSQL to answer, found: {_first_line(error)}; {self._remedy}"
            ) from error
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) == ILLEGAL_MOVE:
                raise IllegalMove(_first_line(error)) from error
            if error.connection_invalidated:
                raise DatabaseUnavailable(f"the connection to PostgreSQL is gone: {_first_line(error)}") from error
            raise

    def sql(self, statement: str | Executable, values: SqlValues = None) -> Result[*tuple[Any, ...]]:
        """Runs `sql` in a transaction of its own; its rows can be read after the commit. Raises: as `begin`."""
        with self.begin() as connection:
            rows = sql(connection, statement, values)
            return rows.freeze()() if rows.returns_rows else rows

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """Gives all reads of this thread in the block one snapshot: each `begin` yields the same transaction.

        Nothing can be written in it. Raises: DatabaseUnavailable.
        """
        with self.begin() as connection:
            sql(connection, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            self._snapshot.connection = connection
            try:
                yield connection
            finally:
                self._snapshot.connection = None

    def raw(self, options: str = "") -> psycopg.Connection:
        """Returns a connection of its own, autocommit, for LISTEN and advisory locks. The caller closes it.

        Raises: DatabaseUnavailable.
        """
        try:
            return _BoundedConnection.connect(
                self.url, autocommit=True, application_name="megaflow-listen", options=options, **_PATIENCE
            )
        except psycopg.OperationalError as error:
            raise DatabaseUnavailable(
                f"expected PostgreSQL to answer, found: {_one_line(str(error))}; {self._remedy}"
            ) from error

    def close(self) -> None:
        pool = self.engine.pool
        self.engine.dispose()
        event.listen(
            pool, "checkin", lambda one, _record: one and one.close()
        )  # closes those in use when they are returned


def sql(
    connection: Connection, statement: str | Executable, values: SqlValues = None
) -> CursorResult[*tuple[Any, ...]]:
    """Runs one SQL statement; `:name` is a placeholder for a value. Several sets of values run it once for each set."""
    return connection.execute(text(statement) if isinstance(statement, str) else statement, values)


class Listener:
    """Receives NOTIFY on some channels; reconnects after a server restart. Not shared between threads."""

    def __init__(self, database: Database, *channels: str) -> None:
        self._database = database
        self._channels = channels
        self._connection: psycopg.Connection | None = None

    def wait(self, timeout_s: float) -> list[str] | None:
        """Returns the payloads that arrived within `timeout_s`; None: the connection is new.

        Returns at the first payload, with all others that have arrived: one check handles them all. After None,
        the caller must check the state itself: notifications may have been missed.

        Raises: DatabaseUnavailable.
        """
        try:
            if self._connection is None:
                self._connect()
                return None
            payloads = [n.payload for n in self._connection.notifies(timeout=timeout_s, stop_after=1)]
            return payloads + [n.payload for n in self._connection.notifies(timeout=0)] if payloads else payloads
        except psycopg.OperationalError as error:
            self.close()
            raise DatabaseUnavailable(f"lost the connection to PostgreSQL: {str(error).strip()}") from error

    def _connect(self) -> None:
        self._connection = self._database.raw()
        for channel in self._channels:
            self._connection.execute(f"LISTEN {channel}".encode())

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


DISPATCHER = 73051
"""Advisory lock of the leading dispatcher."""
RECONCILER = 73052
"""Advisory lock of the leading reconciler."""


def dispatcher_leads(database: Database) -> bool:
    """Whether some dispatcher holds the lead. Raises: DatabaseUnavailable."""
    with database.begin() as connection:
        return has_dispatcher(connection)


def has_dispatcher(connection: Connection) -> bool:
    """Whether a dispatcher leads: as `dispatcher_leads`, within a transaction."""
    statement = (
        "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = :key"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    return sql(connection, statement, {"key": DISPATCHER}).first() is not None


class Leadership:
    """Leader election: a session-level advisory lock, released when its holder's connection ends."""

    def __init__(self, database: Database, key: int, silent_s: float = _LEADER_SILENT_S) -> None:
        """silent_s: seconds of silence after which the server ends the holder's session."""
        self._database = database
        self._key = key
        self._silent_s = silent_s
        self._connection: psycopg.Connection | None = None
        self._lock = threading.Lock()

    def held(self) -> bool:
        """Takes or keeps the lead; False while another has it. Raises: DatabaseUnavailable."""
        with self._lock:
            if self._connection is None:
                # The lock lasts as long as the session: an unreachable leader must not keep it.
                self._connection = self._database.raw(f"-c idle_session_timeout={round(self._silent_s * 1000)}")
            try:
                row = self._connection.execute(
                    "SELECT (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = %(key)s"
                    " AND pid = pg_backend_pid()) > 0 OR pg_try_advisory_lock(%(key)s)",
                    {"key": self._key},
                ).fetchone()
            except psycopg.OperationalError as error:
                self._drop()
                raise DatabaseUnavailable(f"lost the connection to PostgreSQL: {str(error).strip()}") from error
            return bool(row and row[0])

    def release(self) -> None:
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _first_line(error: DBAPIError) -> str:
    return _one_line(str(error.orig)) if error.orig else str(error)


def _one_line(text: str) -> str:
    """Returns the first line, without the driver's prefix for failed connections."""
    first = (text.strip().splitlines() or ["no answer"])[0]
    return first.removeprefix("connection is bad: ").removeprefix("connection failed: ")
