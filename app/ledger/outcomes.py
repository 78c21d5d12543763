"""Waits for the ends of tasks: one listener per client, however many wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from uuid import UUID

from app.errors import DatabaseUnavailable
from app.ledger import results
from app.ledger.database import Database, Listener


class Outcomes:
    """Waits for ends of tasks on one connection, however many threads wait."""

    _LOOK_S = 5.0
    """Seconds between reads of the tables, in case a notification was missed."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._changed = threading.Condition()
        self._waiting: dict[UUID, int] = {}
        self._ended: set[UUID] = set()
        self._thread: threading.Thread | None = None
        self._closing = False

    def completions(self, ids: set[UUID], timeout_s: float | None) -> Iterator[list[UUID]]:
        """Yields tasks when they have ended, until all have or `timeout_s` has passed; reads each task a few times."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        left = set(ids)
        if ended := set(results.ended(self._database, list(left))):
            left -= ended
            yield list(ended)
        if not left:
            return
        self._enter(left)
        try:
            # Read again, now that the listener runs: an end since the first read is not missed.
            ended = set(results.ended(self._database, list(left))) or self._sleep(left, until)
            while ended:
                self._leave(ended)
                left -= ended
                yield list(ended)
                ended = self._sleep(left, until) if left else set()
        finally:
            self._leave(left)

    def _sleep(self, ids: set[UUID], until: float | None) -> set[UUID]:
        left_s = None if until is None else max(0.0, until - time.monotonic())
        with self._changed:
            self._changed.wait_for(lambda: self._closing or not ids.isdisjoint(self._ended), left_s)
            return ids & self._ended

    def _enter(self, ids: set[UUID]) -> None:
        with self._changed:
            for task_id in ids:
                self._waiting[task_id] = self._waiting.get(task_id, 0) + 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._hear, name="outcomes", daemon=True)
                self._thread.start()

    def _leave(self, ids: set[UUID]) -> None:
        with self._changed:
            for task_id in ids:
                self._waiting[task_id] -= 1
                if not self._waiting[task_id]:
                    del self._waiting[task_id]
                    self._ended.discard(task_id)

    def _hear(self) -> None:
        from app.ledger.events import OUTCOME

        listener = Listener(self._database, OUTCOME)
        looked_at = 0.0
        while not self._closing:
            try:
                payloads = listener.wait(1.0)
                if payloads is None or time.monotonic() - looked_at > self._LOOK_S:
                    looked_at = time.monotonic()
                    self._settle(self._look())
                self._settle([UUID(payload) for payload in payloads or ()])
            except DatabaseUnavailable:
                time.sleep(1.0)
        listener.close()

    def _look(self) -> list[UUID]:
        with self._changed:
            waiting = list(self._waiting)
        return results.ended(self._database, waiting) if waiting else []

    def _settle(self, ended: Sequence[UUID]) -> None:
        with self._changed:
            news = [task_id for task_id in ended if task_id in self._waiting]
            self._ended.update(news)
            if news:
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=3)
