"""Reads events from a position on: at least once, in order for every task, none missed.

Why not by id. An id is given when a fact is written and seen when its transaction commits; a reader that has passed id
9 never sees an 8 that commits later. Why not by the oldest open transaction either (deliver every transaction below it,
then the next stretch): a transaction may have its number long before it takes a task's row. With b = 100, another
101 that stays open and a = 102: a writes and commits, then b takes the same row, writes and commits. Below 101 there is
b alone; a, the earlier fact, would come after it.

So a position is a snapshot: which transactions had been decided. What is delivered between two snapshots is exactly
what committed between them, ordered by id.

- Nothing is lost and nothing comes twice: a committed fact is on one side of every snapshot, and the intervals
  between successive snapshots leave no gap and no overlap. One that rolled back is in none.
- Order within a task: the writer of a fact of a task holds the task's row lock until the commit. So of two facts in
  different transactions the earlier one's transaction had ended before the later fact got its id: its id is lower, and
  every snapshot that has the later one has the earlier one. Hence both are in one interval, in order, or the earlier
  one is in an earlier interval.
- Nothing waits for a transaction that stays open: its facts come when it commits.

A snapshot here ends at the newest transaction of which a fact is visible, not at the newest of the server. The set of
facts is the same, the position of an idle system stands still, and every number in it belongs to a durable commit: a
crash of PostgreSQL may hand out numbers again that never reached the disk, and none of those was passed over. (This
wants `synchronous_commit`, the default. A database restored from a dump starts its numbers anew: set `events.txid`
to 0 there, which reads as old.)
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, Self
from uuid import UUID

from sqlalchemy import Connection, text

from app.errors import DatabaseUnavailable, OptionInvalid
from app.ledger.database import Database, Listener, sql
from app.ledger.events import OUTCOME, WORK, EventRecord

START = "0"
"""The position before the first fact."""
PAGE = 1000
"""Facts read at once, when the caller does not say."""

_SNAPSHOT = r"\d{1,18}(?:\.\d{1,18})*"  # fits into a bigint
_POSITION = re.compile(rf"({_SNAPSHOT})(?:-({_SNAPSHOT})-(\d{{1,18}}))?")
_KIND = re.compile(r"[a-z][a-z0-9_]*\.[a-z0-9_]*")
_TICK_S = 0.5
"""A follower looks this often when nothing wakes it: not every fact is worth a NOTIFY."""
_BREATH_S = 0.02
"""Between two looks, however often it is woken."""


@dataclass(frozen=True, slots=True)
class TransactionSnapshot:
    """Transactions decided at one moment: those below `end`, without `running`. Written `END.RUNNING.RUNNING…`."""

    end: int
    running: tuple[int, ...] = ()

    def __str__(self) -> str:
        return ".".join(str(number) for number in (self.end, *self.running))

    @classmethod
    def parse(cls, written: str) -> Self:
        end, *running = (int(number) for number in written.split("."))
        return cls(end, tuple(sorted(running)))


@dataclass(frozen=True, slots=True)
class Position:
    """Everything up to `since` is delivered; of the interval from there to `until`, what has an id up to `last_id`.

    Written `SINCE`, or `SINCE-UNTIL-ID` within an interval.
    """

    since: TransactionSnapshot
    until: TransactionSnapshot | None = None
    last_id: int = 0

    def __str__(self) -> str:
        return str(self.since) if self.until is None else f"{self.since}-{self.until}-{self.last_id}"

    @classmethod
    def parse(cls, written: str) -> Self:
        """Raises: SpecInvalid."""
        match = _POSITION.fullmatch(written)
        if match is None:
            raise _no_position(written)
        since, until, last_id = match.groups()
        position = cls(
            TransactionSnapshot.parse(since), TransactionSnapshot.parse(until) if until else None, int(last_id or 0)
        )
        if position.until is not None and position.until.end < position.since.end:
            raise _no_position(written)
        return position


class StreamedEvent(NamedTuple):
    """A fact and the position right after it: resuming there goes on with the next one."""

    position: str
    event: EventRecord

    def body(self) -> dict[str, Any]:
        """Converts the event to JSON for consumers: position, id, at (ISO 8601), kind, the ids that it has, data."""
        return {"position": self.position} | {name: _plain(value) for name, value in self.event._asdict().items()}


class Page(NamedTuple):
    """Facts in order, and the position after them. Fewer than the limit: that is all for now."""

    events: list[StreamedEvent]
    position: str


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Selection of events: all, unless narrowed. `kinds`: whole kinds, or prefixes that end in a dot (`attempt.`)."""

    kinds: Sequence[str] = ()
    run_id: UUID | None = None
    task_id: UUID | None = None


EVERYTHING = EventFilter()


def check_kinds(kinds: Sequence[str]) -> None:
    """Raises: SpecInvalid."""
    for kind in kinds:
        if not _KIND.fullmatch(kind):
            raise OptionInvalid(
                f"expected a kind of event such as 'attempt.claimed', or a beginning with its dot such as 'attempt.',"
                f" found {kind!r}"
            )


def now(database: Database, since: TransactionSnapshot | None = None) -> str:
    """Returns the position after all committed events. Raises: DatabaseUnavailable; SpecInvalid: bad `since`."""
    with database.begin() as connection:
        return str(_look(connection, since or TransactionSnapshot(0)))


def place(database: Database, where: str) -> str:
    """Parses a position written by a user: `start`, `now`, or one from the stream. Raises: SpecInvalid."""
    at = Position.parse(START if where in ("start", "now") else where)
    newest = now(database, at.until or at.since)
    return newest if where == "now" else str(at)


def read(database: Database, position: str, limit: int = PAGE, wanted: EventFilter = EVERYTHING) -> Page:
    """Reads the next events after a position. The same position and limit give the same events again, or more.

    Raises: SpecInvalid: not a position, or one of another database; DatabaseUnavailable.
    """
    check_kinds(wanted.kinds)
    at, facts = Position.parse(position), list[StreamedEvent]()
    with database.begin() as connection:
        while len(facts) < limit:
            interval = at if at.until is not None else _open(connection, at.since)
            if interval is None or interval.until is None:
                break
            events = _fetch(connection, interval, limit - len(facts), wanted)
            within = f"{interval.since}-{interval.until}-"
            facts.extend(StreamedEvent(f"{within}{event.id}", event) for event in events)
            fresh, at = at.until is None, Position(interval.until)
            if len(facts) == limit:
                at = Position(interval.since, interval.until, facts[-1].event.id)
            elif fresh:
                break
    return Page(facts, str(at))


def follow(
    database: Database,
    position: str,
    stop: threading.Event,
    wanted: EventFilter = EVERYTHING,
    *,
    limit: int = PAGE,
    outage: Callable[[DatabaseUnavailable], object] | None = None,
) -> Iterator[StreamedEvent]:
    """Facts as they are committed, until `stop` is set: within moments where a NOTIFY tells, within 0.5 s else.

    An outage of PostgreSQL is waited out: `outage` hears of it once, and nothing is missed.

    Raises: SpecInvalid; DatabaseUnavailable: at the first look.
    """
    listener = Listener(database, WORK, OUTCOME)
    page, well = read(database, position, limit, wanted), True
    try:
        while not stop.is_set():
            yield from page.events
            try:
                if len(page.events) < limit:
                    wait_for_news(listener, stop)
                page, well = read(database, page.position, limit, wanted), True
            except DatabaseUnavailable as error:
                if well and outage is not None:
                    outage(error)
                page, well = Page([], page.position), False
                stop.wait(1.0)
    finally:
        listener.close()


def wait_for_news(listener: Listener, stop: threading.Event) -> None:
    """Waits until something may have happened; a burst of nudges counts once. Raises: DatabaseUnavailable."""
    if listener.wait(_TICK_S):
        stop.wait(_BREATH_S)
        while listener.wait(0.0) and not stop.is_set():
            pass


_LOOK = text(
    "SELECT pg_current_snapshot()::text, (SELECT max(txid) FROM events WHERE txid <"
    " (pg_snapshot_xmax(pg_current_snapshot())::text)::bigint)"
)
"""Query in one statement, which has one snapshot: that snapshot includes the newest event."""


def _look(connection: Connection, since: TransactionSnapshot) -> TransactionSnapshot:
    """Reads the snapshot of decided transactions. Raises: SpecInvalid: `since` is not in this database's past."""
    written, newest = connection.execute(_LOOK).one()
    _, server_end, running = str(written).split(":")
    if since.end > int(server_end):
        raise OptionInvalid(
            f"expected a position of this database, whose transactions go up to {server_end}, found one at {since.end};"
            " read again from 'start' or 'now'"
        )
    end = max(since.end, (newest or 0) + 1)
    still = (int(number) for number in running.split(",") if number)
    return TransactionSnapshot(end, tuple(sorted(number for number in still if number < end)))


def _open(connection: Connection, since: TransactionSnapshot) -> Position | None:
    """Returns the interval from `since` to this moment; None while nothing has been decided in between."""
    until = _look(connection, since)
    return None if until == since else Position(since, until)


_COLUMNS = ", ".join(EventRecord._fields)
_INTERVAL = (
    "(txid >= :since_end AND txid < :until_end OR txid = ANY(CAST(:since_running AS bigint[])))"
    " AND txid < :until_end AND txid <> ALL(CAST(:until_running AS bigint[]))"
)
_BY_TRANSACTION = f"{_INTERVAL} AND id > :last_id"
_BY_ID = f"id > :last_id AND CASE WHEN {_INTERVAL} THEN true ELSE false END"
"""Same condition as `_BY_TRANSACTION`. The planner estimates the CASE at half of the rows, so it reads the ids in order
until the page is full, instead of sorting all remaining rows for every page."""


def _fetch(connection: Connection, interval: Position, limit: int, wanted: EventFilter) -> list[EventRecord]:
    assert interval.until is not None
    values: dict[str, Any] = {
        "since_end": interval.since.end,
        "since_running": list(interval.since.running),
        "until_end": interval.until.end,
        "until_running": list(interval.until.running),
        "last_id": interval.last_id,
        "limit": limit,
    }
    # A new interval is a few transactions among millions, anywhere in the ids: found by transaction, then sorted. The
    # beginning, and what is left of a large one, is walked by id. A task has few facts, found by its own index.
    fresh = interval.last_id == 0 and interval.since.end > 0 and wanted.task_id is None
    chosen = f"SELECT {_COLUMNS} FROM events WHERE {_BY_TRANSACTION if fresh else _BY_ID}{_narrowed(wanted, values)}"  # noqa: S608
    if fresh or wanted.task_id is not None:
        chosen = f"SELECT {_COLUMNS} FROM ({chosen} OFFSET 0) AS found"  # noqa: S608  # sorted after, never while walking
    return [EventRecord(*row) for row in sql(connection, f"{chosen} ORDER BY id LIMIT :limit", values)]


def _narrowed(wanted: EventFilter, values: dict[str, Any]) -> str:
    conditions = ""
    if wanted.kinds:
        conditions += " AND kind LIKE ANY(CAST(:kinds AS text[]))"
        values["kinds"] = [_pattern(kind) for kind in wanted.kinds]
    for column in ("run_id", "task_id"):
        value = getattr(wanted, column)
        if value is not None:
            conditions += f" AND {column} = :{column}"
            values[column] = value
    return conditions


def _pattern(kind: str) -> str:
    return kind.replace("_", r"\_") + ("%" if kind.endswith(".") else "")


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value) if isinstance(value, UUID) else value


def _no_position(written: str) -> OptionInvalid:
    return OptionInvalid(
        f"expected 'start', 'now', or a position that the stream gave with an event, found {written[:80]!r}"
    )
