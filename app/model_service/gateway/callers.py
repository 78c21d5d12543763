"""Caches sessions by token, and checks every two seconds whether their attempts still run.

The look is one query for all, beside the calls: none of them waits for it but the first of a token. While the ledger is
away, cached sessions stay valid, since no attempt can end then either.
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
"""Seconds until an attempt that has ended is refused."""
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
    """What the caller shows: OpenAI's clients send a bearer, Anthropic's a key of its own."""
    found: bytes | None = None
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            found = value[7:]
        elif name == b"x-api-key" and found is None:
            found = value
    return found.decode("latin-1").strip() if found else None


class Callers:
    """Sessions by token. For one event loop; queries run in threads."""

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
        """Whose token this is.

        Raises: CallRefusal: unknown (401), of an ended attempt (403), of another gateway (421), or no ledger (503).
        """
        if not token:
            raise CallRefusal(401, "token_missing", _NO_TOKEN)
        known = self._known.get(token) or await self._find(token)
        known.used_at = time.monotonic()
        if not known.session.live and not ended_too:
            raise CallRefusal(403, "attempt_ended", _ENDED)
        if known.other_gateway is not None:
            message = f"expected the calls of this attempt at {known.other_gateway}, which has its account"
            raise CallRefusal(421, "misdirected", message)
        return known.session

    async def _find(self, token: str) -> _CachedSession:
        now = time.monotonic()
        if len(token) > _TOKEN_MOST or now - self._unknown.get(token, -_UNKNOWN_S) < _UNKNOWN_S:
            raise CallRefusal(401, "token_unknown", _WRONG)
        asking = self._reading.get(token)
        if asking is None:
            asking = asyncio.create_task(self._ask(token))
            self._reading[token] = asking
            asking.add_done_callback(lambda _: self._reading.pop(token, None))
        try:
            session = await asyncio.shield(asking)
        except DatabaseUnavailable as error:
            raise CallRefusal(
                503, "ledger_unavailable", str(error), CallEnd.UPSTREAM_UNREACHABLE, final=False
            ) from error
        if session is None:
            if len(self._unknown) >= _UNKNOWN_MOST:
                self._unknown.clear()
            self._unknown[token] = time.monotonic()
            raise CallRefusal(401, "token_unknown", _WRONG)
        known = self._known[token] = _CachedSession(session, self._other_gateway(session.attempt_id), time.monotonic())
        return known

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
        """No more calls by its token, here at once and at other gateways soon. Raises: DatabaseUnavailable."""
        await asyncio.to_thread(close_session, self._database, attempt_id)
        for known in self._known.values():
            if known.session.attempt_id == attempt_id:
                known.session = replace(known.session, live=False)

    async def watch(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(FRESH_S)
            old = time.monotonic() - _FORGET_S
            for token in [token for token, known in self._known.items() if known.used_at < old]:
                del self._known[token]
            tokens = [token for token, known in self._known.items() if known.session.live]
            if not tokens:
                continue
            try:
                live = await asyncio.to_thread(self._live, tokens)
            except DatabaseUnavailable as error:
                log.warning("gateway.callers_not_read", error=str(error))
                continue
            except Exception:  # the next look may succeed
                log.exception("gateway.callers_not_read")
                continue
            for token in tokens:
                known = self._known.get(token)
                if known is not None and token not in live:
                    known.session = replace(known.session, live=False)

    def _live(self, tokens: list[str]) -> set[str]:
        with self._database.begin() as connection:
            return live_among(connection, tokens)
