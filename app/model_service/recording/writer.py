"""Writes calls in groups, by a thread, and retries while the ledger is unreachable."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from uuid import UUID

import structlog

from app.errors import DatabaseUnavailable
from app.model_service.recording.process import CallStore
from app.model_service.recording.rows import CountedExchange

log = structlog.get_logger()

_GROUP_S = 0.05
_BATCH_CALLS = 200
_BATCH_BYTES = 16 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_GIVEN_UP = "let go: the ledger was away for too long"

OnWritten = Callable[[Iterable[UUID], DatabaseUnavailable | None], None]
"""Callback with the attempts whose calls were written, or (with the error) were not. Called in the thread."""


class CallWriter:
    """Writer with one thread. `put` never waits; the queue is limited by the bytes of its bodies."""

    def __init__(self, store: CallStore, told: OnWritten, *, kept_bytes: int) -> None:
        self._store = store
        self._on_written = told
        self._kept_bytes = kept_bytes
        self._forgotten: list[UUID] = []
        self._waiting: deque[CountedExchange] = deque()
        self._bytes = 0
        self._given_up = 0  # number of waiting calls without bodies, from the oldest on
        self._open: Counter[UUID] = Counter()
        self._changed = threading.Condition()
        self._hurry = False
        self._closing_by: float | None = None
        self._thread = threading.Thread(target=self._run, name="model-calls", daemon=True)
        self._thread.start()

    def put(self, counted: CountedExchange) -> None:
        with self._changed:
            self._waiting.append(counted)
            self._bytes += counted.size
            self._open[counted.exchange.session.attempt_id] += 1
            self._bound()
            self._changed.notify()

    def hurry(self) -> None:
        """Writes now instead of grouping: a flush waits."""
        with self._changed:
            self._hurry = True
            self._changed.notify()

    def open_calls(self, attempt_id: UUID) -> int:
        """Counts the attempt's calls that are not in the ledger yet."""
        with self._changed:
            return self._open[attempt_id]

    def forget(self, attempt_id: UUID) -> None:
        """Marks an attempt as ended."""
        with self._changed:
            self._forgotten.append(attempt_id)

    def close(self, timeout_s: float) -> int:
        """Writes the remaining calls within `timeout_s`. Returns the number of calls that could not be written."""
        with self._changed:
            self._closing_by = time.monotonic() + timeout_s
            self._changed.notify()
        self._thread.join(timeout_s + 1.0)
        self._store.close()
        with self._changed:
            return len(self._waiting)

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while (batch := self._next()) is not None:
            with self._changed:
                forgotten, self._forgotten = self._forgotten, []
            try:
                self._store.write(batch, forgotten)
            except DatabaseUnavailable as error:
                fault = error
            except Exception as error:  # the thread goes on, and the calls stay queued
                log.exception("recorder.write_failed")
                fault = DatabaseUnavailable(f"expected the ledger to take calls, found {type(error).__name__}: {error}")
            else:
                pause_s = _FIRST_PAUSE_S
                self._done(batch)
                continue
            log.warning("recorder.ledger_away", calls=len(self._waiting), bytes=self._bytes, error=str(fault)[:500])
            self._on_written({one.exchange.session.attempt_id for one in batch}, fault)
            if not self._pause(pause_s):
                return
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    def _next(self) -> list[CountedExchange] | None:
        """Returns the oldest calls, which stay queued until they are written. None: closed, and nothing left."""
        with self._changed:
            while not self._waiting and self._closing_by is None:
                self._changed.wait()
            if not self._waiting:
                return None
            if not self._hurry and self._closing_by is None:
                self._changed.wait_for(lambda: self._hurry or self._closing_by is not None, _GROUP_S)
            self._hurry = False
            batch: list[CountedExchange] = []
            total = 0
            for one in self._waiting:
                total += one.size
                if batch and (total > _BATCH_BYTES or len(batch) >= _BATCH_CALLS):
                    self._hurry = True
                    break
                batch.append(one)
            return batch

    def _done(self, batch: Sequence[CountedExchange]) -> None:
        attempts = {one.exchange.session.attempt_id for one in batch}
        with self._changed:
            for one in batch:
                self._bytes -= self._waiting.popleft().size
                self._given_up = max(0, self._given_up - 1)
                self._open[one.exchange.session.attempt_id] -= 1
            for attempt in attempts:
                if self._open[attempt] <= 0:
                    del self._open[attempt]
        self._on_written(attempts, None)

    def _pause(self, pause_s: float) -> bool:
        """Waits before a retry. False: closed, and out of time."""
        with self._changed:
            until = time.monotonic() + pause_s
            while (left := until - time.monotonic()) > 0 and not self._hurry:
                if self._closing_by is not None and time.monotonic() >= self._closing_by:
                    return False
                self._changed.wait(min(left, 0.2))
            self._hurry = False
            return self._closing_by is None or time.monotonic() < self._closing_by

    def _bound(self) -> None:
        while self._bytes > self._kept_bytes and self._given_up < len(self._waiting):
            one = self._waiting[self._given_up]
            bare = replace(one, exchange=replace(one.exchange, request=b"", response=b""), given_up=_GIVEN_UP)
            self._waiting[self._given_up] = bare
            self._bytes -= one.size
            self._given_up += 1
