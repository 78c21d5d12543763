"""Reads events after a position: at least once, in order for every task, none missed.

A position is no id: an id is assigned when a fact is written and visible when its transaction commits; a reader past
id 9 never sees an 8 that commits later. Nor is it the oldest open transaction (deliver all transactions below it, then
the next range): a transaction may have its number long before it locks a task's row. With b = 100, another
101 that stays open and a = 102: a writes and commits, then b locks the same row, writes and commits. Below 101 there is
only b; a, the earlier fact, would be delivered after it.

So a position is a snapshot: the set of transactions decided by then. Between two snapshots, exactly the facts that
committed between them are delivered, ordered by id.

- No fact is lost or delivered twice: a committed fact is on one side of every snapshot, and the intervals
  between successive snapshots leave no gap and no overlap. A fact that was rolled back is in no interval.
- Order within a task: the writer of a fact of a task holds the task's row lock until the commit. So of two facts in
  different transactions the earlier one's transaction had ended before the later fact got its id: its id is lower, and
  every snapshot that has the later one has the earlier one. Hence both are in one interval, in order, or the earlier
  one is in an earlier interval.
- No reader waits for a transaction that stays open: its facts are delivered when it commits.

A snapshot here ends at the newest transaction of which a fact is visible, not at the newest of the server. The set of
facts is the same, the position of an idle system does not change, and every number in it belongs to a durable commit: a
crash of PostgreSQL may reuse numbers that never reached the disk, and none of those is in a position. (This
requires `synchronous_commit`, the default. A database restored from a dump restarts its numbers: set `events.txid`
to 0 there, so that its facts count as old.)
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
"""Number of facts read at once by default."""

_SNAPSHOT = r"\d{1,18}(?:\.\d{1,18})*"  # fits into a bigint
_POSITION = re.compile(rf"({_SNAPSHOT})(?:-({_SNAPSHOT})-(\d{{1,18}}))?")
_KIND = re.compile(r"[a-z][a-z0-9_]*\.[a-z0-9_]*")
_TICK_S = 0.5
"""Seconds between reads of a follower that no NOTIFY wakes: not every fact sends one."""
_BREATH_S = 0.02
"""Least seconds between two reads, however often the follower is woken."""


@dataclass(frozen=True, slots=True)
class TransactionSnapshot:
    """Transactions decided at one moment: those below `end` without `running`. Written `END.RUNNING.RUNNING…`."""

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
    """Position in the stream: facts up to `since` are delivered; from there to `until`, those with ids up to `last_id`.

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
    """A fact and the position directly after it, from which a reader can resume."""

    position: str
    event: EventRecord

    def body(self) -> dict[str, Any]:
        """Returns the event as JSON for consumers: position, id, at (ISO 8601), kind, the ids that it has, data."""
        return {"position": self.position} | {name: _plain(value) for name, value in self.event._asdict().items()}


class Page(NamedTuple):
    """Facts in order, and the position after them. Fewer facts than the limit: no more exist now."""

    events: list[StreamedEvent]
    position: str


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Filter of facts: all by default. `kinds`: full kinds, or prefixes that end in a dot (`attempt.`)."""

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
    """Returns the position after all committed facts. Raises: DatabaseUnavailable; SpecInvalid: `since` is not past."""
    with database.begin() as connection:
        return str(_look(connection, since or TransactionSnapshot(0)))


def place(database: Database, where: str) -> str:
    """Returns the position that a user wrote: `start`, `now`, or one from the stream. Raises: SpecInvalid."""
    at = Position.parse(START if where in ("start", "now") else where)
    newest = now(database, at.until or at.since)
    return newest if where == "now" else str(at)


def read(database: Database, position: str, limit: int = PAGE, wanted: EventFilter = EVERYTHING) -> Page:
    """Returns the next facts after a position. The same position and limit return the same facts again, or more.

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
    """Yields facts as they are committed, until `stop` is set: at once where a NOTIFY is sent, else within 0.5 s.

    An outage of PostgreSQL is waited out: `outage` is called once, and no fact is missed.

    Raises: SpecInvalid; DatabaseUnavailable: at the first read.
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
    """Waits until facts may have been added; a burst of notifications counts as one. Raises: DatabaseUnavailable."""
    if listener.wait(_TICK_S):
        stop.wait(_BREATH_S)
        while listener.wait(0.0) and not stop.is_set():
            pass


_LOOK = text(
    "SELECT pg_current_snapshot()::text, (SELECT max(txid) FROM events WHERE txid <"
    " (pg_snapshot_xmax(pg_current_snapshot())::text)::bigint)"
)
"""Snapshot and newest fact, in one statement, so that the snapshot includes that fact."""


def _look(connection: Connection, since: TransactionSnapshot) -> TransactionSnapshot:
    """Returns the current snapshot. Raises: SpecInvalid: `since` is not of this database's past."""
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
    """Returns the interval from `since` to now; None if nothing has been decided in between."""
    until = _look(connection, since)
    return None if until == since else Position(since, until)


_COLUMNS = ", ".join(EventRecord._fields)
_INTERVAL = (
    "(txid >= :since_end AND txid < :until_end OR txid = ANY(CAST(:since_running AS bigint[])))"
    " AND txid < :until_end AND txid <> ALL(CAST(:until_running AS bigint[]))"
)
_BY_TRANSACTION = f"{_INTERVAL} AND id > :last_id"
_BY_ID = f"id > :last_id AND CASE WHEN {_INTERVAL} THEN true ELSE false END"
"""SQL condition like the one above. The planner cannot see into the CASE and assumes that half of the rows match, so it
walks the ids in order until the page is full, instead of sorting all remaining rows for every page."""


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
    # A new interval is a few transactions among millions, with any ids: search by transaction, then sort. The
    # first interval, and the rest of a large one, is read by id. A task's facts are few and have an index.
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
