"""What a worker asks about its attempt: the account so far, and, at the end, that everything is on record."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, replace
from typing import Any

import structlog
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.errors import DatabaseUnavailable
from app.model_service.gateway.attempts import AttemptCalls
from app.model_service.gateway.callers import token_of
from app.model_service.gateway.parts import Parts
from app.model_service.gateway.refusals import Refusal
from app.models.model_calls import Account, CallEnd, ModelSession

log = structlog.get_logger()

CLOSE_S = 10.0
_CLOSE_MOST_S = 120.0


class SessionDesk:
    """The two answers; by the attempt's own token, also after its end."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def account(self, request: Request) -> Response:
        """What the attempt has had so far; `waited_s` counts calls that wait at this moment, too."""
        try:
            session = await self._session(request)
            return await self._said(session)
        except Refusal as refusal:
            return _no(refusal.status, refusal.code, refusal.message)
        except DatabaseUnavailable as error:
            return _no(503, "ledger_unavailable", str(error))

    async def close(self, request: Request) -> Response:
        """Take no more calls, wait for those under way (`?timeout_s=`), write all of it down, and say the account."""
        try:
            session = await self._session(request)
            timeout_s = _seconds(request.query_params.get("timeout_s"))
            calls = self._parts.attempts.of(session.attempt_id)
            calls.close()
            await self._parts.callers.close_session(session.attempt_id)
            await _all_ended(calls, timeout_s)
            await self._parts.recorder.flush(session.attempt_id)
            said = await self._said(session)
            if not calls.in_flight:
                self._parts.recorder.forget(session.attempt_id)
            return said
        except Refusal as refusal:
            return _no(refusal.status, refusal.code, refusal.message)
        except DatabaseUnavailable as error:
            return _no(503, "ledger_unavailable", str(error))

    async def _session(self, request: Request) -> ModelSession:
        return await self._parts.callers.session(token_of(request.scope["headers"]), ended_too=True)

    async def _said(self, session: ModelSession) -> Response:
        account = await self._parts.recorder.account(session)
        calls = self._parts.attempts.of(session.attempt_id)
        said = spoken(replace(account, gateway=self._parts.boot), calls)
        return JSONResponse(said | {"attempt_id": str(session.attempt_id), "closed": calls.closed or not session.live})


def spoken(account: Account, calls: AttemptCalls) -> dict[str, Any]:
    """As JSON; `app.model_service.client` reads it."""
    waiting_s = calls.waiting_s()
    return asdict(account) | {
        "waited_s": account.waited_s + waiting_s,
        "in_flight": calls.in_flight,
        "waiting": len(calls.waiting_since),
    }


async def _all_ended(calls: AttemptCalls, timeout_s: float) -> None:
    give_up = time.monotonic() + timeout_s
    while calls.in_flight and (left_s := give_up - time.monotonic()) > 0:
        try:
            await calls.one_ends(left_s)
        except TimeoutError:
            log.warning("gateway.calls_outlive_attempt", calls=calls.in_flight)
            return
    await asyncio.sleep(0)


def _seconds(said: str | None) -> float:
    try:
        found = CLOSE_S if said is None else float(said)
    except ValueError:
        found = -1.0
    if not 0 <= found <= _CLOSE_MOST_S:
        raise Refusal(
            400,
            "invalid_request",
            f"timeout_s: expected 0 to {_CLOSE_MOST_S:g} seconds, found {said!r}",
            CallEnd.REFUSED,
        )
    return found


def _no(status: int, code: str, message: str) -> Response:
    return JSONResponse({"error": {"code": code, "message": message}}, status_code=status)
