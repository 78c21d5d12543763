"""Chooses the engine of a call: a replica, else the spec's endpoint, else that of the settings.

Models named `replay` and `replay:NAME` go to the replay engine, unless a row has exactly that name.

Routes follow the table within a second (NOTIFY, and a query each second as a fallback). While the ledger is
unreachable, the last known routes stay valid.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from urllib.parse import urlsplit
from uuid import UUID

import aiohttp
import structlog

from app.errors import DatabaseUnavailable, LimitInvalid
from app.ledger import model_replicas
from app.ledger.database import Database, Listener
from app.ledger.model_replicas import ANY, CHANGED, DRAINING, HELD, ModelReplica, Registered, plain_url
from app.model_service.gateway.engines import ModelEngine, Target
from app.model_service.serving import CallRefusal
from app.models.model_calls import CallEnd, Dialect, ModelSession
from app.models.spec import ModelChoice
from app.settings import Settings

log = structlog.get_logger()

_LOOK_S = 1.0
_UNROUTED_MOST = 256
"""Limit of remembered engines without a row: tasks may name any."""


class Routes:
    """Models and their engines. For one event loop; a separate thread follows the table."""

    def __init__(self, settings: Settings, http: aiohttp.ClientSession, database: Database) -> None:
        self._settings = settings
        self._http = http
        self._database = database
        self._registered = Registered.of(settings, ())
        self._table: dict[str, tuple[Target, ...]] = {}
        self._direct: dict[tuple[str, str | None], Target] = {}
        self._engines: dict[str, ModelEngine] = {}
        self._known = asyncio.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._follow, args=(loop,), name="gateway-routes", daemon=True)
        self._thread.start()

    def _follow(self, loop: asyncio.AbstractEventLoop) -> None:
        listener = Listener(self._database, CHANGED)
        last: tuple[ModelReplica, ...] | None = None
        try:
            while not self._stopping.is_set():
                try:
                    listener.wait(_LOOK_S)
                    rows = self._read()
                except DatabaseUnavailable as error:
                    log.warning("gateway.routes_not_read", error=str(error))
                    self._stopping.wait(_LOOK_S)
                    continue
                if rows != last:
                    last = rows
                    with suppress(RuntimeError):  # the event loop is closed
                        loop.call_soon_threadsafe(self.apply, rows)
        finally:
            listener.close()

    async def refresh(self) -> None:
        """Reads the table now. Raises: DatabaseUnavailable."""
        self.apply(await asyncio.to_thread(self._read))

    def _read(self) -> tuple[ModelReplica, ...]:
        with self._database.begin() as connection:
            return tuple(model_replicas.listed(connection))

    def apply(self, rows: Iterable[ModelReplica]) -> None:
        """Replaces all replicas at once: a swap then happens at one moment for every model."""
        rows = tuple(rows)
        self._registered = Registered.of(self._settings, rows)
        table: dict[str, list[Target]] = {}
        for row in rows:
            table.setdefault(row.model, []).append(self._target(row, sum(r.model == row.model for r in rows) > 1))
        self._table = {model: tuple(targets) for model, targets in table.items()}
        held = {row.url.rstrip("/") for row in rows if row.state == HELD}
        for engine in self._engines.values():
            engine.routed = False
            engine.loaded.clear() if engine.url in held else engine.loaded.set()
        for target in (target for targets in self._table.values() for target in targets):
            target.engine.routed = True
        self._forget()
        self._known.set()
        log.info("gateway.routes", models=len(self._table), replicas=len(rows))

    def _target(self, row: ModelReplica, others: bool) -> Target:
        return Target(
            engine=self.engine(row.url),
            upstream_model=row.upstream_model,
            policy_version=row.policy_version,
            dialects=row.dialects,
            api_key_env=row.api_key_env,
            key_expected=row.api_key_env is not None,
            context_tokens=row.context_tokens,
            draining=row.state == DRAINING,
            others=others,
            named=row.engine,
        )

    def engine(self, url: str) -> ModelEngine:
        """Returns the engine of a base URL. All models that it serves share its state."""
        url = url.rstrip("/")
        if url not in self._engines:
            if len(self._engines) >= _UNROUTED_MOST:
                self._forget()
            replay = _address(url) == _address(self._settings.replay_endpoint())
            self._engines[url] = ModelEngine(url, self._http, replay=replay)
        return self._engines[url]

    def _forget(self) -> None:
        """Drops engines without row and calls: those that no direct target uses, and the oldest others."""
        urls_used = {target.engine.url for target in self._direct.values()}
        free = [one for one in self._engines.values() if not one.routed and one.idle]
        direct = sorted((one for one in free if one.url in urls_used), key=lambda one: one.chosen_at)
        old = [one for one in free if one.url not in urls_used] + direct[: max(0, len(direct) - _UNROUTED_MOST // 2)]
        for engine in old:
            engine.stop_probing()
            del self._engines[engine.url]
        urls = {engine.url for engine in old}
        self._direct = {key: one for key, one in self._direct.items() if one.engine.url not in urls}

    @property
    def engines(self) -> Collection[ModelEngine]:
        return self._engines.values()

    @property
    def models(self) -> list[str]:
        """Names of models that have a row of their own."""
        return sorted(model for model in self._table if model != ANY)

    async def known(self, timeout_s: float) -> None:
        """Waits until the table was read once: before, a call could go to the wrong engine. Raises: TimeoutError."""
        if not self._known.is_set():
            async with asyncio.timeout(timeout_s):
                await self._known.wait()

    def choose(
        self, session: ModelSession, model: str, stuck: dict[str, str], avoid: Collection[str] = ()
    ) -> Target | None:
        """Chooses the target of the attempt's next call. None: all its engines drain, and none has the attempt.

        `stuck`: URL of the engine of the attempt's earlier calls, by route; it is updated. `avoid`: engines that have
        just failed this call; one of them is chosen only if there is no other.

        Raises: CallRefusal: the model has no row, and its spec names a URL or a key that it may not use.
        """
        name = model if model in self._table else ANY
        targets = self._table.get(name)
        if not targets or (name == ANY and session.model.replay and session.model.base_url is None):
            return self._without_row(session.model)
        previous = stuck.get(name)
        if previous is not None:
            for target in targets:
                if target.engine.url == previous and target.engine.healthy and previous not in avoid:
                    return target
        accepting = [one for one in targets if not one.draining or one.engine.url == previous]
        if not accepting:
            return None
        candidates = [one for one in accepting if one.engine.healthy and one.engine.url not in avoid]
        candidates = candidates or [one for one in accepting if one.engine.healthy] or accepting
        chosen = max(candidates, key=lambda one: _weight(session.attempt_id, one.engine.url))
        stuck[name] = chosen.engine.url
        return chosen

    def targets(self, own: ModelChoice) -> tuple[Target, ...]:
        """Returns all targets for calls of this model. Raises: CallRefusal: none, or one that it may not use."""
        name = own.name if own.name in self._table else ANY
        targets = self._table.get(name)
        if not targets or (name == ANY and own.replay and own.base_url is None):
            return (self._without_row(own),)
        return tuple(one for one in targets if not one.draining) or targets

    def _without_row(self, own: ModelChoice) -> Target:
        if own.base_url is None and own.replay:
            return self._direct_target(self._settings.replay_endpoint(), None, "MEGAFLOW_REPLAY_URL")
        url = own.base_url or self._settings.model_base_url
        if url is None:
            raise CallRefusal(
                404,
                "model_not_found",
                f"model {own.name!r}: no engine answers for it; expected an endpoint (--base-url, or the setting"
                f" MEGAFLOW_MODEL_BASE_URL) or a route; try `megaflow models add {own.name} URL`",
                CallEnd.NOT_FOUND,
            )
        named_by = "MEGAFLOW_MODEL_BASE_URL" if own.base_url is None else "model.base_url"
        engine = self._engine_of(url, named_by)
        if (why := self._registered.refusal(own, engine.url)) is not None:
            raise CallRefusal(403, "not_registered", f"{named_by}: {why}", CallEnd.UNAUTHORISED)
        # The settings' key is sent only to the settings' engine.
        settings = self._settings
        key = own.api_key_env or (settings.model_api_key_env if own.base_url is None else None)
        named = own.api_key_env is not None or "model_api_key_env" in settings.model_fields_set
        return self._direct_target(url, key, named_by, key_expected=named and key is not None)

    def _direct_target(self, url: str, key: str | None, named_by: str, *, key_expected: bool = False) -> Target:
        """Returns the target of a URL. named_by: its setting or field. Raises: CallRefusal: it is no base URL."""
        target = self._direct.get((url, key))
        if target is None:
            engine = self._engine_of(url, named_by)
            target = Target(
                engine=engine,
                dialects=tuple(Dialect) if engine.replay else (),
                api_key_env=None if engine.replay else key,
                key_expected=key_expected and not engine.replay,
            )
            self._direct[url, key] = target
        target.engine.chosen_at = time.monotonic()
        return target

    def _engine_of(self, url: str, named_by: str) -> ModelEngine:
        try:
            return self.engine(plain_url(url))
        except (LimitInvalid, ValueError):  # not shown: the value may be a secret
            raise CallRefusal(
                400,
                "engine_invalid",
                f"{named_by}: expected a base URL such as http://engine.example.org:8000/v1, without user, password"
                " and query, found something else; a key is named by `api_key_env`",
                CallEnd.UNAUTHORISED,
            ) from None

    async def close(self) -> None:
        self._stopping.set()
        for engine in self._engines.values():
            await engine.close()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _LOOK_S * 5)


def _address(url: str) -> tuple[str, int | None]:
    """Returns host and port, with one name for this host's loopback. Raises: ValueError."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    loopback = host in {"localhost", "::1", "0.0.0.0"} or host.startswith("127.")
    return "127.0.0.1" if loopback else host, parts.port or (443 if parts.scheme == "https" else 80)


def _weight(attempt_id: UUID, url: str) -> bytes:
    """Returns a rendezvous hash: each attempt ranks the engines in its own order, so a new one gets only its share."""
    return hashlib.blake2b(attempt_id.bytes + url.encode(), digest_size=8).digest()
