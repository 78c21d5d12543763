"""Tells attempts to stop and instances to drain, by a message over Redis; leases are the fallback."""

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
    """Have workers look at once: attempts that must stop, instances that drain.

    Does nothing when Redis is away: the lease's renewal says the same.
    """
    if not ids:
        return
    with (
        suppress(redis.RedisError),
        redis.Redis.from_url(settings.redis(), socket_connect_timeout=2) as client,
        client.pipeline(transaction=False) as pipeline,
    ):
        for named in ids:
            pipeline.publish(_channel(settings), str(named))
        pipeline.execute()


class StopListener:
    """A Redis subscription that comes back by itself; deaf while Redis is away."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pubsub: redis.client.PubSub | None = None

    def listen(self, timeout_s: float) -> list[UUID]:
        """Attempts named within `timeout_s`."""
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
