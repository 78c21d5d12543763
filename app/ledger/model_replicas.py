"""Stores the replicas that serve a model's name, as set by an administrator.

A model's name is stable; its engine, the engine's own name for it and the policy's version change in one transaction.
Every change notifies the channel `CHANGED`, so that gateways reload at once.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

from sqlalchemy import Connection, Row, insert, text
from uuid_utils import compat as uuids

from app.errors import LimitInvalid, UnknownName
from app.ledger import events
from app.ledger.database import Database, sql
from app.ledger.events import Fact
from app.models.addresses import forbidden_url, normal_url
from app.models.engines import EngineKind
from app.models.model_calls import Dialect
from app.models.provider_keys import EXPECTED, is_key_variable
from app.models.service_tables import ModelReplicaRow
from app.models.spec import ModelChoice
from app.settings import Settings

CHANGED = "megaflow_models"
"""Channel: a model's replicas changed; the payload is the model's name."""

ANY = "*"
"""Name for every model without its own row."""

ACTIVE = "active"
DRAINING = "draining"
"""State: the engine takes no new attempts; its current ones stay."""
HELD = "held"
"""State: the engine's weights are being changed, and calls wait for it."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")
_OURS = "MEGAFLOW_"


@dataclass(frozen=True, slots=True)
class ModelReplica:
    """An engine that serves a model's name. `dialects` empty: the gateway finds out which it supports."""

    id: UUID
    model: str
    url: str
    upstream_model: str | None
    policy_version: str
    dialects: tuple[Dialect, ...]
    api_key_env: str | None
    context_tokens: int | None
    engine: EngineKind
    state: str
    added_at: datetime


@dataclass(frozen=True, slots=True)
class NewReplica:
    """An engine to be added. `api_key_env` is the name of a variable of the gateway, never a key."""

    model: str
    url: str
    upstream_model: str | None = None
    policy_version: str = ""
    dialects: tuple[Dialect, ...] = ()
    api_key_env: str | None = None
    context_tokens: int | None = None
    engine: EngineKind = EngineKind.UNKNOWN


def listed(connection: Connection, model: str | None = None) -> list[ModelReplica]:
    """Returns all replicas, or those of one model, in the order in which they were added."""
    condition = "" if model is None else "WHERE model = :model "
    statement = text(f"SELECT * FROM model_replicas {condition}ORDER BY model, added_at, id")  # noqa: S608 (no input)
    rows = connection.execute(statement, {} if model is None else {"model": model})
    return [_read(row) for row in rows]


def add(database: Database, new: NewReplica) -> ModelReplica:
    """Raises: LimitInvalid: a value is impossible, or the model has this engine already; nothing was changed."""
    check_new(new)
    with database.begin() as connection:
        _alone(connection)
        if any(one.url == plain_url(new.url) for one in listed(connection, new.model)):
            raise LimitInvalid(
                f"model {new.model!r} has {plain_url(new.url)} already; nothing was changed; to change what it serves:"
                " `megaflow models swap`"
            )
        replica = _insert(connection, new)
        _tell(connection, "model.added", new.model, {"url": replica.url, "version": replica.policy_version})
    return replica


def drain(database: Database, model: str, url: str | None = None) -> list[ModelReplica]:
    """Stops new attempts on one engine of the model, or on all; running ones stay. Raises: UnknownName."""
    return _to(database, model, url, DRAINING, "model.draining")


def resume(database: Database, model: str, url: str | None = None) -> list[ModelReplica]:
    """Undoes `drain`. Raises: UnknownName."""
    return _to(database, model, url, ACTIVE, "model.resumed")


def remove(database: Database, model: str, url: str | None = None) -> list[ModelReplica]:
    """Removes engines of a model; calls in progress end normally. Raises: UnknownName."""
    with database.begin() as connection:
        _alone(connection)
        replicas = _named(connection, model, url)
        ids = [one.id for one in replicas]
        sql(connection, "DELETE FROM model_replicas WHERE id = ANY(CAST(:ids AS uuid[]))", {"ids": ids})
        _tell(connection, "model.removed", model, {"urls": [one.url for one in replicas]})
    return replicas


def hold(database: Database, model: str, *, takes_over: bool = False) -> list[ModelReplica]:
    """Makes calls wait for the engines that take new attempts, until `swap` or `resume`.

    takes_over: also holds engines that are held already.

    Raises: UnknownName; LimitInvalid: some are held already.
    """
    with database.begin() as connection:
        _alone(connection)
        replicas = _named(connection, model, None)
        if not takes_over and any(one.state == HELD for one in replicas):
            raise LimitInvalid(
                f"model {model!r}: expected engines that take calls, found some that a publication holds; wait for it,"
                f" or, when it was killed, restart them and `megaflow models resume {model}`; nothing was changed"
            )
        replicas = [one for one in replicas if one.state in (ACTIVE, HELD)]
        if not replicas:
            raise LimitInvalid(f"model {model!r}: expected an engine that takes attempts, found that all are draining")
        _set_state(connection, replicas, HELD)
        _tell(connection, "model.held", model, {"urls": [one.url for one in replicas]})
    return replicas


def let_go(database: Database, model: str) -> None:
    """Undoes `hold`."""
    with database.begin() as connection:
        _alone(connection)
        _set_state(connection, [one for one in listed(connection, model) if one.state == HELD], ACTIVE)
        _tell(connection, "model.resumed", model, {})


def swap(
    database: Database, model: str, *, policy_version: str, upstream_model: str | None = None
) -> list[ModelReplica]:
    """Sets the policy version of a model's engines, for all calls that begin from then on; returns its replicas.

    The engines stay: they have loaded other weights, or serve them by `upstream_model`. Engines that drain keep their
    version.

    Raises: UnknownName: the model has no replica.
    """
    with database.begin() as connection:
        _alone(connection)
        _named(connection, model, None)
        sql(
            connection,
            "UPDATE model_replicas SET policy_version = :version, state = 'active',"
            " upstream_model = coalesce(:upstream, upstream_model) WHERE model = :model AND state <> 'draining'",
            {"version": policy_version, "upstream": upstream_model, "model": model},
        )
        now = listed(connection, model)
        urls = [one.url for one in now if one.state == ACTIVE]
        _tell(connection, "model.swapped", model, {"version": policy_version, "urls": urls})
    return now


def _insert(connection: Connection, new: NewReplica) -> ModelReplica:
    values = asdict(new) | {"id": uuids.uuid7(), "url": plain_url(new.url), "dialects": [d.value for d in new.dialects]}
    return _read(
        connection.execute(insert(ModelReplicaRow).values(values).returning(*ModelReplicaRow.__table__.c)).one()
    )


def _to(database: Database, model: str, url: str | None, state: str, kind: str) -> list[ModelReplica]:
    with database.begin() as connection:
        _alone(connection)
        replicas = _named(connection, model, url)
        _set_state(connection, replicas, state)
        _tell(connection, kind, model, {"urls": [one.url for one in replicas]})
        ids = {one.id for one in replicas}
        return [one for one in listed(connection, model) if one.id in ids]


def _named(connection: Connection, model: str, url: str | None) -> list[ModelReplica]:
    everything = listed(connection)
    of_model = [one for one in everything if one.model == model]
    if not of_model:
        raise UnknownName.of("model", model, sorted({one.model for one in everything}))
    replicas = [one for one in of_model if url is None or one.url == plain_url(url)]
    if not replicas:
        raise UnknownName.of(f"engine of model {model!r}", str(url), [one.url for one in of_model])
    return replicas


def _set_state(connection: Connection, replicas: Sequence[ModelReplica], state: str) -> None:
    sql(
        connection,
        "UPDATE model_replicas SET state = :state WHERE id = ANY(CAST(:ids AS uuid[]))",
        {"state": state, "ids": [one.id for one in replicas]},
    )


def _alone(connection: Connection) -> None:
    """Locks the table for one writer: it has few rows, changed by hand or by a trainer between two versions."""
    sql(connection, "LOCK TABLE model_replicas IN SHARE ROW EXCLUSIVE MODE")


def _tell(connection: Connection, kind: str, model: str, data: dict[str, Any]) -> None:
    events.append(connection, Fact(kind, data={"model": model, **data}))
    sql(connection, "SELECT pg_notify(:channel, :model)", {"channel": CHANGED, "model": model[:200]})


def _read(row: Row[*tuple[Any, ...]]) -> ModelReplica:
    known = {dialect.value for dialect in Dialect}
    values = row._asdict()
    read = {"dialects": tuple(Dialect(one) for one in row.dialects if one in known), "engine": EngineKind(row.engine)}
    return ModelReplica(**values | read)


def check_variable(name: str) -> None:
    """Raises: LimitInvalid: this cannot be the name of a variable with an engine's key. The error hides the name."""
    if not _VARIABLE.fullmatch(name):
        raise LimitInvalid(
            "expected the NAME of an environment variable of the gateway (letters, digits, _), found something else;"
            " a key itself is never written down; nothing was changed"
        )
    if name.upper().startswith(_OURS):
        raise LimitInvalid(f"expected a variable that holds an engine's key, found one of ours ({name})")


def check_new(new: NewReplica) -> None:
    """Raises: LimitInvalid: a value is impossible."""
    if not new.model or len(new.model) > 200 or not new.model.isprintable():
        raise LimitInvalid(f"model: expected a name of 1 to 200 printable characters, or {ANY}, found {new.model!r}")
    if (why := forbidden_url(plain_url(new.url))) is not None:
        raise LimitInvalid(f"engine: expected a model server, found {why} in {new.url}; nothing was changed")
    if new.api_key_env is not None:
        check_variable(new.api_key_env)
        if not is_key_variable(new.api_key_env):
            raise LimitInvalid(
                f"the key's variable: expected {EXPECTED} (only the gateway gets such variables),"
                f" found {new.api_key_env}; export the key under another name; nothing was changed"
            )
    if new.context_tokens is not None and new.context_tokens < 1:
        raise LimitInvalid(f"context_tokens: expected 1 or more, found {new.context_tokens}; nothing was changed")


@lru_cache(1024)
def plain_url(url: str) -> str:
    """Returns an engine's base URL in the form that is stored, shown and recorded, so that it may hold no secret.

    Raises: LimitInvalid: it is no such URL; the error shows no part that may be secret.
    """
    try:
        parts = urlsplit(url)
        named = parts.username is not None or parts.password is not None
        whole = bool(parts.scheme in {"http", "https"} and parts.hostname) and parts.port != 0
    except ValueError:
        raise LimitInvalid("engine: expected a URL, found one with a wrong host or port; nothing was changed") from None
    if named:
        raise LimitInvalid("engine: expected a URL without a user and a password: name a variable with the key")
    if parts.query or parts.fragment:
        raise LimitInvalid("engine: expected a base URL without a query and a fragment; nothing was changed")
    if not whole or not url.isprintable() or " " in url:
        raise LimitInvalid(
            f"engine: expected a base URL such as http://engine.example.org:8000/v1, found {url!r:.200};"
            " nothing was changed"
        )
    return normal_url(url)


_NAME_MOST = 60


@dataclass(frozen=True, slots=True)
class Registered:
    """Base URLs that a submission may name, each with variables of keys: a key goes only to URLs registered with it."""

    pairs: frozenset[tuple[str, str | None]]
    shared: bool

    @classmethod
    def of(cls, settings: Settings, rows: Iterable[ModelReplica]) -> Registered:
        """Collects what `megaflow models add` and the settings have registered."""
        pairs = {(normal_url(row.url), row.api_key_env) for row in rows}
        if settings.model_base_url is not None:
            pairs.add((normal_url(settings.model_base_url), settings.model_api_key_env))
        return cls(frozenset(pairs), settings.shared_installation)

    def refusal(self, model: ModelChoice, url: str) -> str | None:
        """Returns why this model may not be called at `url`, with the command that would allow it; None: it may.

        url: `model.base_url`, or that of the settings.
        """
        url = normal_url(url)
        if (why := forbidden_url(url)) is not None:
            return f"{url}: expected a model server, found {why}; models are never called there"
        key = model.api_key_env
        if key is not None and (url, key) not in self.pairs:
            return (
                f"the key {_shown(key)} is not registered for {url}: a key goes only to URLs that were registered"
                f" with it; expected a registered pair; try `{_command(model.name, url, key)}`"
            )
        if self.shared and url not in {one for one, _ in self.pairs}:
            return (
                f"{url} is not registered: a shared installation (MEGAFLOW_SHARED_INSTALLATION) calls registered URLs"
                f" only; its administrator may run `{_command(model.name, url, None)}`"
            )
        return None


def _shown(variable: str) -> str:
    """Returns the name of a variable, unless it could be a key itself."""
    plain = len(variable) <= _NAME_MOST and variable.isidentifier() and variable.isupper()
    return variable if plain else "VAR"


def _command(model: str, url: str, variable: str | None) -> str:
    key = "" if variable is None else f" --api-key-env {_shown(variable)}"
    return f"megaflow models add {shlex.quote(model)} {shlex.quote(url)}{key}"
