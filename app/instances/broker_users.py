"""Manages each joined host's own user in Redis, with rights for a worker's queues and wake-up messages only."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import redis

from app.errors import BrokerUnavailable, InstallationFailed
from app.settings import Settings

_RULES = (
    "reset", "resetchannels", "on", "~persistent.*", "~grading.*", "~ephemeral.*", "~_kombu.binding*", "~unacked*",
    "-@all", "+@read", "+@write", "+@connection", "+@transaction", "+@pubsub",
    "-@dangerous", "+info", "+time", "+eval", "+evalsha",
    "+script|load", "+script|exists",
)  # fmt: skip
"""Rules with the keys of queues, but not of limits, nor of the control worker's queue."""


def _rules(settings: Settings) -> tuple[str, ...]:
    """Returns the rules with keys of people's shells and channels, except the one that shuts down Celery's workers."""
    with redis.Redis.from_url(settings.redis()) as client:
        number = client.get_connection_kwargs().get("db", 0)
    ours = f"megaflow:{settings.installation}"
    return (*_RULES, f"~{ours}:shells:*", f"~{ours}:shell:*", f"&{ours}:stop", f"&/{number}.celeryev/*")


def add(settings: Settings, account: str, digest: str) -> None:
    """Creates the user anew. digest: SHA-256 of its password. Raises: BrokerUnavailable, InstallationFailed."""
    with _server(settings) as client:
        _acl(client, "SETUSER", account, *_rules(settings), f"#{digest}")


def remove(settings: Settings, account: str) -> None:
    """Removes the user and ends its connections; no error when there is none. Raises: as `add`."""
    with _server(settings) as client:
        _acl(client, "DELUSER", account)


def restore(settings: Settings, wanted: Mapping[str, str]) -> list[str]:
    """Creates missing users (with digests), removes those of left hosts. Returns their names. Raises: as `add`."""
    ours = re.compile(rf"mf_{re.escape(settings.installation)}_[0-9a-f]{{12}}")
    with _server(settings) as client:
        known = {name for name in map(_text, _acl(client, "USERS")) if ours.fullmatch(name)}
        for account in sorted(wanted.keys() - known):
            _acl(client, "SETUSER", account, *_rules(settings), f"#{wanted[account]}")
        for account in sorted(known - wanted.keys()):
            _acl(client, "DELUSER", account)
    return sorted(wanted.keys() ^ known)


def _acl(client: redis.Redis, *words: str) -> Any:
    return client.execute_command("ACL", *words)  # type: ignore[no-untyped-call]


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name


@contextmanager
def _server(settings: Settings) -> Iterator[redis.Redis]:
    try:
        with redis.Redis.from_url(settings.redis(), socket_connect_timeout=5, socket_timeout=10) as client:
            yield client
    except (redis.exceptions.NoPermissionError, redis.exceptions.ResponseError) as error:
        raise InstallationFailed(
            f"expected that our user in Redis may make users for hosts, found: {error}; try, as an administrator"
            " of Redis: ACL SETUSER NAME +acl|setuser +acl|deluser +acl|users"
        ) from error
    except redis.RedisError as error:
        raise BrokerUnavailable(f"expected Redis to answer, found: {error}; try again") from error
