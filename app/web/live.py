"""Tells many viewers of one change with one look at the database: a page's moving part is made once for all of them."""

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
"""Between two looks at the database, on average, however many view what."""
_CHANGE_S = 0.5
"""After a message that tasks ended: more of them are one change."""
_STOP_S = 0.2
"""How long a server that is told to stop, and a new topic, may wait for the next look."""
_ALIVE_S = 5.0
"""A stream says at least this often that it lives."""
_KEPT = 64
"""Texts that are kept for pages."""


@dataclass(slots=True)
class _Topic:
    """A part of a page that several viewers see: its newest text, with a number that goes up."""

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
    """Looks for new events in a thread of its own; wakes streams of the event loop that started it."""

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
        """How often the database was asked for changes."""

    def start(self, beside: Callable[[], None] = lambda: None) -> None:
        """Begin to look. Call within the event loop. beside: reads in the transaction of each look."""
        self._beside = beside
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._look, name="live", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and all streams."""
        self._stop.set()
        self._tell({})
        if self._thread is not None:
            self._thread.join(10)

    async def changes(self) -> AsyncGenerator[int, None]:
        """A number for each change of the ledger, at once for the first; also when nothing changed for some seconds."""
        while not self._stop.is_set():
            change, waiting = self._change, self._changed
            yield change
            if change != self._change:  # meanwhile
                continue
            with suppress(TimeoutError):
                await asyncio.wait_for(waiting.wait(), _ALIVE_S)

    def text(self, key: str, make: Callable[[], str]) -> str:
        """A topic's text now, for a page: what its viewers have, or made at most once after each change."""
        if (kept := self._fresh(key)) is not None:
            return kept
        change, text = self._change, make()
        self._keep(key, change, text)
        return text

    def forget(self) -> None:
        """Have texts made anew: a caller of this server just changed something."""
        self._kept.clear()
        self._again = True

    async def texts(self, key: str, make: Callable[[], str]) -> AsyncIterator[str]:
        """The text of a topic now, then each time it differs after a change; empty: nothing new, to show life.

        make: makes the text, in the thread that looks; called once for all viewers of the key.
        """
        topic = self._topics.setdefault(key, _Topic(make))
        topic.viewers += 1
        if (kept := self._fresh(key)) is not None:
            topic.show(kept)
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
        kept = self._kept.get(key)
        return kept[1] if kept is not None and kept[0] == self._change and self.looks else None

    def _keep(self, key: str, change: int, text: str) -> None:
        self._kept[key] = (change, text)
        for old in list(self._kept)[:-_KEPT]:
            self._kept.pop(old, None)

    def _look(self) -> None:
        """Until `stop`, look once a second. A message that tasks ended is told at once; the next look comes early."""
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
        """The newest event; where it is another one, all that is watched is made anew, as of one moment."""
        again, self._again = self._again, False
        with self._database.snapshot() as connection:
            found: int | None = sql(connection, "SELECT max(id) FROM events").scalar()
            self.looks += 1
            self._beside()
            changed = again or found != newest
            made: dict[str, str | Exception] = {}
            for key, topic in list(self._topics.items()):
                if changed or not topic.number:
                    made[key] = _made(topic)
                    if isinstance(made[key], Exception):  # perhaps of the transaction: the others in the next one
                        self._again = True
                        break
        if changed or made:
            self._tell(made)
        return found

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
