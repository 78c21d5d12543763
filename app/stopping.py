"""Telling running attempts to stop: a nudge over Redis, with the lease's renewal as the net under it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from uuid import UUID

import redis

from app.settings import Settings


def stop_channel(settings: Settings) -> str:
    """Redis channel on which attempts are told to stop."""
    return f"megaflow:{settings.installation}:stop"


def nudge(settings: Settings, attempt_ids: Sequence[UUID]) -> None:
    """Tell running attempts at once that they must stop. Does nothing when Redis is away: the renewal says the same."""
    with suppress(redis.RedisError), redis.Redis.from_url(settings.redis(), socket_connect_timeout=2) as client:
        for attempt_id in attempt_ids:
            client.publish(stop_channel(settings), str(attempt_id))
