"""Updates many viewers with one query of the database: a page's live part is made once for all of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import structlog

from app.errors import DatabaseUnavailable
from app.ledger.database import Database, Listener, sql
from app.ledger.events import OUTCOME

log = structlog.get_logger()

_LOOK_S = 1.0
"""Seconds between two reads of the database on average, for any number of viewers and topics."""
_CHANGE_S = 0.5
"""Seconds after a message that tasks ended: ends within them count as one change."""
_STOP_S = 0.2
"""Seconds that a stopping server, or a new topic, may wait for the next read."""
_ALIVE_S = 5.0
"""Most seconds without a sign of life in a stream."""
_KEPT = 64
"""Most texts that are cached for pages."""


@dataclass(slots=True)
class _Topic:
    """A part of a page that several viewers see: its newest text, with a version number."""

    make: Callable[[], str]
    viewers: int = 0
    text: str = ""
    number: int = 0  # 0: not made yet
    error: Exception | None = None

    def show(self, made: str | Exception) -> None:
        if isinstance(made, Exception):
            self.error = made
        elif made != self.text or not self.number:
            self.text, self.number = made, self.number + 1


class Live:
    """Reads new events in a thread of its own; wakes streams of the event loop that started it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._topics: dict[str, _Topic] = {}
        self._kept: dict[str, tuple[int, str]] = {}
        self._changed = asyncio.Event()
        self._change = 0
        self._again = False
        self._stop = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._beside: Callable[[], None] = lambda: None
        self.looks = 0
        """Number of reads of the database."""

    def start(self, beside: Callable[[], None] = lambda: None) -> None:
        """Starts the thread. Call within the event loop. beside: a function called in the transaction of each read."""
        self._beside = beside
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._look, name="live", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and all streams."""
        self._stop.set()
        self._tell({})
        if self._thread is not None:
            self._thread.join(10)

    async def changes(self) -> AsyncGenerator[int, None]:
        """Yields a number at once, then after each change of the ledger; also when nothing changed for some seconds."""
        while not self._stop.is_set():
            change, waiting = self._change, self._changed
            yield change
            if change != self._change:  # changed meanwhile
                continue
            with suppress(TimeoutError):
                await asyncio.wait_for(waiting.wait(), _ALIVE_S)

    def text(self, key: str, make: Callable[[], str]) -> str:
        """Returns a topic's text for a page: the text of its viewers, or one made at most once after each change."""
        if (cached := self._fresh(key)) is not None:
            return cached
        change, text = self._change, make()
        self._keep(key, change, text)
        return text

    def forget(self) -> None:
        """Drops the cached texts: a caller of this server just changed something."""
        self._kept.clear()
        self._again = True

    async def texts(self, key: str, make: Callable[[], str]) -> AsyncIterator[str]:
        """Yields the text of a topic now, then each time it differs after a change; an empty text is a sign of life.

        make: makes the text in this object's thread; called once for all viewers of the key.
        """
        topic = self._topics.setdefault(key, _Topic(make))
        topic.viewers += 1
        if (cached := self._fresh(key)) is not None:
            topic.show(cached)
        shown = 0
        try:
            async for _ in self.changes():
                if topic.error is not None:
                    raise topic.error
                if topic.number != shown:
                    shown = topic.number
                    yield topic.text
                else:
                    yield ""
        finally:
            topic.viewers -= 1
            if not topic.viewers:
                self._topics.pop(key, None)

    def _fresh(self, key: str) -> str | None:
        cached = self._kept.get(key)
        return cached[1] if cached is not None and cached[0] == self._change and self.looks else None

    def _keep(self, key: str, change: int, text: str) -> None:
        self._kept[key] = (change, text)
        for old in list(self._kept)[:-_KEPT]:
            self._kept.pop(old, None)

    def _look(self) -> None:
        """Reads once a second until `stop`. A message that tasks ended wakes streams at once; the next read is soon."""
        listener, newest, due = Listener(self._database, OUTCOME), None, time.monotonic()
        while not self._stop.is_set():
            try:
                if listener.wait(min(max(0.0, due - time.monotonic()), _STOP_S)):
                    self._tell({})
                    self._stop.wait(max(_CHANGE_S, due - time.monotonic() - _LOOK_S))
                    due += _LOOK_S
                elif time.monotonic() >= due:
                    due = time.monotonic() + _LOOK_S
                elif not self._again and all(topic.number for topic in list(self._topics.values())):
                    continue
                newest = self._read(newest)
            except DatabaseUnavailable as error:
                log.warning("web.live_failed", error=str(error))
                newest = None
                listener.close()
                self._stop.wait(_CHANGE_S)
        listener.close()

    def _read(self, newest: int | None) -> int | None:
        """Returns the id of the newest event. If it is new, makes the texts of all topics, in one snapshot."""
        again, self._again = self._again, False
        with self._database.snapshot() as connection:
            latest: int | None = sql(connection, "SELECT max(id) FROM events").scalar()
            self.looks += 1
            self._beside()
            changed = again or latest != newest
            texts: dict[str, str | Exception] = {}
            for key, topic in list(self._topics.items()):
                if changed or not topic.number:
                    texts[key] = _made(topic)
                    if isinstance(texts[key], Exception):  # the transaction may have failed: others in the next one
                        self._again = True
                        break
        if changed or texts:
            self._tell(texts)
        return latest

    def _tell(self, made: Mapping[str, str | Exception]) -> None:
        if self._loop is None or self._loop.is_closed():
            return

        def change() -> None:
            self._change += 1
            for key, text in made.items():
                if (topic := self._topics.get(key)) is not None:
                    topic.show(text)
                if isinstance(text, str):
                    self._keep(key, self._change, text)
            self._changed.set()
            self._changed = asyncio.Event()

        self._loop.call_soon_threadsafe(change)


def _made(topic: _Topic) -> str | Exception:
    try:
        return topic.make()
    except DatabaseUnavailable:
        raise
    except Exception as error:  # noqa: BLE001 (its streams end with it, the other topics go on)
        return error
