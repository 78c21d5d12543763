"""Tells many viewers of one change with one look at the database: a page's moving part is made once for all of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import structlog
from starlette.concurrency import run_in_threadpool

from app.errors import DatabaseUnavailable
from app.ledger.database import Database, Listener, sql
from app.ledger.events import OUTCOME

log = structlog.get_logger()

_LOOK_S = 1.0
"""Between two looks for new events, however many view what."""
_CHANGE_S = 0.5
"""After a message that tasks ended: more of them are one change."""
_STOP_S = 0.2
"""How long a server that is told to stop may wait for it."""
_ALIVE_S = 5.0
"""A stream says at least this often that it lives."""
_KEPT = 64
"""Texts that are kept for pages."""
_BREATH_S = 1.0
"""Between two texts of one topic."""


@dataclass(slots=True)
class _Topic:
    """A part of a page that several viewers see: its newest text, with a number that goes up."""

    make: Callable[[], str]
    viewers: int = 0
    text: str = ""
    number: int = 0
    seen: int = -1  # the change after which it was made
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Live:
    """Looks for new events in a thread of its own; wakes streams of the event loop that started it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._topics: dict[str, _Topic] = {}
        self._kept: dict[str, tuple[int, str]] = {}
        self._changed = asyncio.Event()
        self._change = 0
        self._stop = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.looks = 0
        """How often the database was asked for changes."""

    def start(self) -> None:
        """Begin to look. Call within the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._look, name="live", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and all streams."""
        self._stop.set()
        self._tell()
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
        kept = self._kept.get(key)
        if kept is not None and kept[0] == self._change and self.looks:
            return kept[1]
        change, text = self._change, make()
        self._kept[key] = (change, text)
        while len(self._kept) > _KEPT:
            self._kept.pop(next(iter(self._kept)), None)
        return text

    def forget(self) -> None:
        """Have texts made anew: a caller of this server just changed something."""
        self._kept.clear()
        self._tell()

    async def texts(self, key: str, make: Callable[[], str]) -> AsyncIterator[str]:
        """The text of a topic now, then each time it differs after a change; empty: nothing new, to show life.

        make: makes the text, in a thread; called once for all viewers of the key.
        """
        topic = self._topics.setdefault(key, _Topic(make))
        topic.viewers += 1
        shown = 0
        try:
            async for change in self.changes():
                await self._make(key, topic, change)
                if topic.number != shown:
                    shown = topic.number
                    yield topic.text
                    await asyncio.sleep(_BREATH_S / 2)
                else:
                    yield ""
        finally:
            topic.viewers -= 1
            if not topic.viewers:
                self._topics.pop(key, None)

    async def _make(self, key: str, topic: _Topic, change: int) -> None:
        """The first viewer who asks makes the text; the others wait for it."""
        async with topic.lock:
            if topic.seen == change:
                return
            topic.seen = change
            try:
                text = await run_in_threadpool(self.text, key, topic.make)
                if text != topic.text:
                    topic.text, topic.number = text, topic.number + 1
            except DatabaseUnavailable as error:
                log.warning("web.live_failed", error=str(error))

    def _look(self) -> None:
        """Until `stop`: tell of tasks that ended as soon as a message says so, and of other events at the next look."""
        listener, newest, due = Listener(self._database, OUTCOME), None, time.monotonic()
        while not self._stop.is_set():
            try:
                if listener.wait(min(max(0.0, due - time.monotonic()), _STOP_S)):
                    self._tell()
                    self._stop.wait(_CHANGE_S)
                if time.monotonic() < due:
                    continue
                due = time.monotonic() + _LOOK_S
                with self._database.begin() as connection:
                    found = sql(connection, "SELECT max(id) FROM events").scalar()
                self.looks += 1
                if found != newest:
                    newest = found
                    self._tell()
            except DatabaseUnavailable:
                listener.close()
                self._stop.wait(_CHANGE_S)
        listener.close()

    def _tell(self) -> None:
        if self._loop is None or self._loop.is_closed():
            return

        def change() -> None:
            self._change += 1
            self._changed.set()
            self._changed = asyncio.Event()

        self._loop.call_soon_threadsafe(change)
