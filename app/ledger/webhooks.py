"""Stores webhooks: their kinds of events, their position, and the state of their deliveries."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlsplit
from uuid import UUID

from sqlalchemy import insert, text
from uuid_utils import compat as uuids

from app.errors import OptionInvalid, UnknownName
from app.ledger import events, stream
from app.ledger.database import Database, sql
from app.ledger.events import Fact
from app.models.provider_keys import is_key_variable
from app.models.service_tables import WebhookRow

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_OURS = "MEGAFLOW_"


@dataclass(frozen=True, slots=True)
class Hook:
    """A webhook. `failures`: in a row; `wait_s`: until the next try, 0 when it may be now."""

    id: UUID
    url: str
    kinds: tuple[str, ...]
    secret_env: str | None
    position: str
    created_at: datetime
    failures: int
    wait_s: float
    last_error: str | None
    delivered_at: datetime | None


def add(
    database: Database,
    url: str,
    kinds: Sequence[str] = (),
    *,
    secret_env: str | None = None,
    position: str | None = None,
) -> Hook:
    """Adds a webhook that sends `url` facts of these kinds (none: all) after `position`, or from now on.

    Raises: SpecInvalid: nothing was added.
    """
    check_url(url)
    stream.check_kinds(kinds)
    if secret_env is not None and (not _VARIABLE.fullmatch(secret_env) or secret_env.upper().startswith(_OURS)):
        # The value is not shown: it may be the secret itself.
        raise OptionInvalid(
            "expected the name of an environment variable that holds the secret, such as HOOK_SECRET (not one of"
            f" {_OURS}…, which are settings); found something else"
        )
    if secret_env is not None and is_key_variable(secret_env):
        raise OptionInvalid(
            f"expected a variable that the control worker has, such as HOOK_SECRET, found {secret_env}: names of this"
            " form are kept for the gateway"
        )
    place = stream.now(database) if position is None else stream.place(database, position)
    hook_id = uuids.uuid7()
    with database.begin() as connection:
        values = {"id": hook_id, "url": url, "kinds": list(kinds), "secret_env": secret_env, "position": place}
        connection.execute(insert(WebhookRow), values)
        events.append(connection, Fact("webhook.added", data={"webhook": str(hook_id)}))
    return next(hook for hook in all_of(database) if hook.id == hook_id)


def check_url(url: str) -> None:
    """Raises: SpecInvalid."""
    expected = "expected a URL such as https://example.org/hook"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise OptionInvalid(f"{expected}, found {url!r}: {error}") from error
    if parts.username or parts.password:
        raise OptionInvalid(f"{expected} without a name or password in it; sign with --secret-env instead")
    if parts.scheme not in ("http", "https") or not host or re.search(r"[\s\x00-\x1f]", url):
        raise OptionInvalid(f"{expected} (http or https, with a host), found {url!r}")
    if parts.fragment:
        raise OptionInvalid(f"{expected} without a fragment, found #{parts.fragment}: it would never be sent")


def all_of(database: Database) -> list[Hook]:
    """Returns all webhooks, the oldest first. Raises: DatabaseUnavailable."""
    statement = text(
        "SELECT id, url, kinds, secret_env, position, created_at, failures,"
        " greatest(0, coalesce(extract(epoch FROM retry_at - clock_timestamp()), 0))::float8 AS wait_s,"
        " last_error, delivered_at FROM webhooks ORDER BY created_at, id"
    )
    return [Hook(row.id, row.url, tuple(row.kinds), *row[3:]) for row in database.sql(statement)]


def remove(database: Database, name: str) -> Hook:
    """Removes the webhook whose id begins or ends with `name`; events in transit may arrive. Raises: UnknownName."""
    part = name.lower()
    known = all_of(database)
    hooks = [hook for hook in known if part and (str(hook.id).startswith(part) or str(hook.id).endswith(part))]
    if len(hooks) != 1:
        raise UnknownName.of("webhook", name, [str(hook.id) for hook in known])
    with database.begin() as connection:
        sql(connection, "DELETE FROM webhooks WHERE id = :id", {"id": hooks[0].id})
        events.append(connection, Fact("webhook.removed", data={"webhook": str(hooks[0].id)}))
    return hooks[0]


def delivered(database: Database, hook_id: UUID, old: str, new: str) -> bool:
    """Records that facts after `old` up to `new` arrived; False: the webhook was removed or has another position."""
    statement = text(
        "UPDATE webhooks w SET position = :new, failures = 0, retry_at = NULL, last_error = NULL,"
        " delivered_at = clock_timestamp() FROM (SELECT id, failures FROM webhooks WHERE id = :id FOR UPDATE) before"
        " WHERE w.id = before.id AND w.position = :old RETURNING before.failures"
    )
    with database.begin() as connection:
        row = connection.execute(statement, {"id": hook_id, "old": old, "new": new}).first()
        if row is not None and row.failures:
            events.append(connection, Fact("webhook.recovered", data={"webhook": str(hook_id)}))
    return row is not None


def passed_over(database: Database, hook_id: UUID, old: str, new: str) -> bool:
    """Records that no fact between the two positions concerns this webhook; False as for `delivered`."""
    statement = text("UPDATE webhooks SET position = :new WHERE id = :id AND position = :old RETURNING id")
    return database.sql(statement, {"id": hook_id, "old": old, "new": new}).first() is not None


def failed(database: Database, hook_id: UUID, position: str, error: str, wait_s: float) -> bool:
    """Records that facts after `position` did not arrive, to be resent in `wait_s` seconds; False as for `delivered`.

    Only the first failure in a row is a fact: a webhook that receives its own failures would never finish.
    """
    statement = text(
        "UPDATE webhooks SET failures = failures + 1, last_error = :error,"
        " retry_at = clock_timestamp() + make_interval(secs => :wait_s)"
        " WHERE id = :id AND position = :position RETURNING failures"
    )
    values = {"id": hook_id, "position": position, "error": error[:500], "wait_s": wait_s}
    with database.begin() as connection:
        row = connection.execute(statement, values).first()
        if row is not None and row.failures == 1:
            data = {"webhook": str(hook_id), "error": error[:500]}
            events.append(connection, Fact("webhook.failing", data=data))
    return row is not None
