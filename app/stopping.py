"""Signals attempts to stop and instances to drain, by a Redis message; lease renewal is the fallback."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from uuid import UUID

import redis

from app.settings import Settings


def _channel(settings: Settings) -> str:
    return f"megaflow:{settings.installation}:stop"


def nudge(settings: Settings, ids: Sequence[UUID]) -> None:
    """Makes workers check at once for attempts that must stop and instances that drain.

    Does nothing when Redis is away: the next lease renewal carries the same information.
    """
    if not ids:
        return
    with (
        suppress(redis.RedisError),
        redis.Redis.from_url(settings.redis(), socket_connect_timeout=2) as client,
        client.pipeline(transaction=False) as pipeline,
    ):
        for identity in ids:
            pipeline.publish(_channel(settings), str(identity))
        pipeline.execute()


class StopListener:
    """Redis subscription that reconnects by itself. Messages sent while Redis is away are lost."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pubsub: redis.client.PubSub | None = None

    def listen(self, timeout_s: float) -> list[UUID]:
        """Returns the ids published within `timeout_s`: attempts or instances."""
        try:
            if self._pubsub is None:
                client = redis.Redis.from_url(self._settings.redis(), socket_connect_timeout=2)
                self._pubsub = client.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
                self._pubsub.subscribe(_channel(self._settings))
            message = self._pubsub.get_message(timeout=timeout_s)
        except redis.RedisError:
            self.close()
            time.sleep(timeout_s)
            return []
        return [UUID(message["data"].decode())] if message and message["type"] == "message" else []

    def close(self) -> None:
        if self._pubsub is not None:
            with suppress(redis.RedisError, OSError):
                self._pubsub.close()
            self._pubsub = None
