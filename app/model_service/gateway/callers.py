"""Caches sessions by token, and checks every two seconds whether their attempts still run.

One query checks all of them in the background; only the first call of a token waits for the database. While the ledger
is unreachable, cached sessions stay valid, because no attempt can end then either.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from uuid import UUID

import structlog

from app.errors import DatabaseUnavailable
from app.ledger.database import Database
from app.ledger.model_sessions import close_session, live_among, session_of
from app.model_service.serving import CallRefusal, cancel_all
from app.models.model_calls import CallEnd, ModelSession

log = structlog.get_logger()

FRESH_S = 2.0
"""Seconds until calls of an ended attempt are refused."""
_FORGET_S = 60.0
"""A token that was unused for this many seconds is read again at its next call."""
_UNKNOWN_S = 1.0
_UNKNOWN_MOST = 10_000
_AGAIN_S = 0.5
_TOKEN_MOST = 512

_NO_TOKEN = "expected the attempt's token as `Authorization: Bearer` or `x-api-key`, found none"
_WRONG = "unknown token: expected the one that MegaFlow gave this attempt"
_ENDED = "the attempt that this token was made for has ended, or its account was closed; its calls are over"


@dataclass(slots=True)
class _CachedSession:
    session: ModelSession
    other_gateway: str | None
    used_at: float


def token_of(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Returns the caller's token: OpenAI's clients send a bearer token, Anthropic's the header `x-api-key`."""
    token: bytes | None = None
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            token = value[7:]
        elif name == b"x-api-key" and token is None:
            token = value
    return token.decode("latin-1").strip() if token else None


class Callers:
    """Cache of sessions by token. For one event loop; queries run in threads."""

    def __init__(self, database: Database, *, patience_s: float, other_gateway: Callable[[UUID], str | None]) -> None:
        """other_gateway: the URL of the other gateway that serves an attempt; None: this one does."""
        self._database = database
        self._other_gateway = other_gateway
        self._patience_s = patience_s
        self._known: dict[str, _CachedSession] = {}
        self._unknown: dict[str, float] = {}
        self._reading: dict[str, asyncio.Task[ModelSession | None]] = {}

    async def close(self) -> None:
        await cancel_all(*self._reading.values())

    async def session(self, token: str | None, *, ended_too: bool = False) -> ModelSession:
        """Returns the session of a token.

        Raises: CallRefusal: unknown (401), of an ended attempt (403), of another gateway (421), or no ledger (503).
        """
        if not token:
            raise CallRefusal(401, "token_missing", _NO_TOKEN)
        cached = self._known.get(token) or await self._find(token)
        cached.used_at = time.monotonic()
        if not cached.session.live and not ended_too:
            raise CallRefusal(403, "attempt_ended", _ENDED)
        if cached.other_gateway is not None:
            message = f"expected the calls of this attempt at {cached.other_gateway}, which has its account"
            raise CallRefusal(421, "misdirected", message)
        return cached.session

    async def _find(self, token: str) -> _CachedSession:
        now = time.monotonic()
        if len(token) > _TOKEN_MOST or now - self._unknown.get(token, -_UNKNOWN_S) < _UNKNOWN_S:
            raise CallRefusal(401, "token_unknown", _WRONG)
        query = self._reading.get(token)
        if query is None:
            query = asyncio.create_task(self._ask(token))
            self._reading[token] = query
            query.add_done_callback(lambda _: self._reading.pop(token, None))
        try:
            session = await asyncio.shield(query)
        except DatabaseUnavailable as error:
            raise CallRefusal(
                503, "ledger_unavailable", str(error), CallEnd.UPSTREAM_UNREACHABLE, final=False
            ) from error
        if session is None:
            if len(self._unknown) >= _UNKNOWN_MOST:
                self._unknown.clear()
            self._unknown[token] = time.monotonic()
            raise CallRefusal(401, "token_unknown", _WRONG)
        cached = self._known[token] = _CachedSession(session, self._other_gateway(session.attempt_id), time.monotonic())
        return cached

    async def _ask(self, token: str) -> ModelSession | None:
        give_up = time.monotonic() + self._patience_s
        while True:
            try:
                return await asyncio.to_thread(self._read, token)
            except DatabaseUnavailable as error:
                if time.monotonic() > give_up:
                    raise
                log.warning("gateway.ledger_silent", error=str(error))
                await asyncio.sleep(_AGAIN_S)

    def _read(self, token: str) -> ModelSession | None:
        with self._database.begin() as connection:
            return session_of(connection, token)

    async def close_session(self, attempt_id: UUID) -> None:
        """Refuses further calls by its token: here at once, at other gateways soon. Raises: DatabaseUnavailable."""
        await asyncio.to_thread(close_session, self._database, attempt_id)
        for cached in self._known.values():
            if cached.session.attempt_id == attempt_id:
                cached.session = replace(cached.session, live=False)

    async def watch(self) -> None:
        """Checks the cached sessions every `FRESH_S` seconds, for ever."""
        while True:
            await asyncio.sleep(FRESH_S)
            old = time.monotonic() - _FORGET_S
            for token in [token for token, cached in self._known.items() if cached.used_at < old]:
                del self._known[token]
            tokens = [token for token, cached in self._known.items() if cached.session.live]
            if not tokens:
                continue
            try:
                live = await asyncio.to_thread(self._live, tokens)
            except DatabaseUnavailable as error:
                log.warning("gateway.callers_not_read", error=str(error))
                continue
            except Exception:  # the next round may succeed
                log.exception("gateway.callers_not_read")
                continue
            for token in tokens:
                cached = self._known.get(token)
                if cached is not None and token not in live:
                    cached.session = replace(cached.session, live=False)

    def _live(self, tokens: list[str]) -> set[str]:
        with self._database.begin() as connection:
            return live_among(connection, tokens)
