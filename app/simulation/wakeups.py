"""Receives wake-up messages for simulated instances."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import redis
import structlog
from celery import Celery
from kombu.utils.json import loads
from pydantic import ValidationError

from app.models.outcome import WakeUpMessage

log = structlog.get_logger()

_TASK = "attempt.run"
_BATCH = 500
_LISTEN_S = 1
_AGAIN_S = 0.3
_BROKEN = (redis.RedisError, OSError)


class WakeUpListener:
    """Takes messages from one queue: at most as many as there are free slots.

    kombu's own consumer takes one message per round trip. Its Redis transport stores a queue as a list, so a batch is
    popped from that list in one command and decoded by kombu.
    """

    def __init__(self, celery: Celery, queue: str, deliver: Callable[[str, list[WakeUpMessage]], object]) -> None:
        self._celery = celery
        self._queue = queue
        self._deliver = deliver
        self._free = 0  # open slots minus messages without a slot
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"messages-{queue}", daemon=True)
        self._thread.start()

    def slots(self, change: int) -> None:
        """Adds free slots, or removes them (negative)."""
        with self._changed:
            self._free += change
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()

    def _run(self) -> None:
        while not self._closing:
            try:
                with self._celery.connection_for_read() as connection, connection.channel() as channel:
                    while not self._closing:
                        self._listen(channel)
            except _BROKEN as error:
                log.debug("simulation.broker_silent", queue=self._queue, error=str(error))
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, _AGAIN_S)

    def _listen(self, channel: Any) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._free > 0 or self._closing, _LISTEN_S) or self._closing:
                return
        client = channel.client
        first = client.brpop([self._queue], timeout=_LISTEN_S)
        if first is None:
            return
        with self._changed:
            self._free -= 1
            more = min(self._free, _BATCH)
        raw_messages = [first[1], *(client.rpop(self._queue, more) or ())] if more > 0 else [first[1]]
        with self._changed:
            self._free -= len(raw_messages) - 1
        messages = [message for message in (_message(channel, raw) for raw in raw_messages) if message is not None]
        if len(messages) < len(raw_messages):
            self.slots(len(raw_messages) - len(messages))
        self._deliver(self._queue, messages)


def _message(channel: Any, raw: bytes) -> WakeUpMessage | None:
    """Decodes a message written by Celery; None: not a valid message."""
    message = channel.message_to_python(loads(raw))  # type: ignore[no-untyped-call]
    try:
        if message.headers.get("task") != _TASK:
            raise ValueError(f"expected the task {_TASK}, found {message.headers.get('task')!r}")
        _, message, _ = message.decode()
        return WakeUpMessage.model_validate(message)
    except (ValidationError, ValueError) as error:
        log.warning("simulation.no_message", error=str(error))
        return None
