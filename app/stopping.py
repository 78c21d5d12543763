"""Tells attempts to stop and instances to drain, by a message over Redis; leases are the fallback."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from uuid import UUID

import redis

from app.settings import Settings


def stop_channel(settings: Settings) -> str:
    """Redis channel on which attempts are told to stop."""
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
            pipeline.publish(stop_channel(settings), str(named))
        pipeline.execute()
