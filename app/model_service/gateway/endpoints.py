"""Serves every path except model calls: an attempt's usage, the list of models, token counts."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict

import structlog
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.model_service.dialects import codec_for
from app.model_service.gateway.callers import token_of
from app.model_service.gateway.calls import GatewayServices
from app.model_service.gateway.enforcement import refuse_other_models
from app.model_service.gateway.state import AttemptCalls
from app.model_service.serving import CallRefusal, ClientDisconnected, model_entry, read_body, read_request
from app.models.model_calls import Dialect, ModelSession

log = structlog.get_logger()

CLOSE_S = 10.0
_CLOSE_MOST_S = 120.0
_CHARACTERS = 4
"""Approximate characters per token, in English and in code."""


async def refused(request: Request, error: Exception) -> Response:
    """Returns the response to an error of these endpoints, in the caller's dialect."""
    if isinstance(error, ClientDisconnected):
        return Response(status_code=499)
    if not isinstance(error, CallRefusal):  # the ledger is away
        error = CallRefusal(503, "ledger_unavailable", str(error))
    anthropic = "anthropic-version" in request.headers or request.url.path.endswith("/count_tokens")
    codec = codec_for(Dialect.MESSAGES if anthropic else Dialect.CHAT)
    return JSONResponse(codec.error(error.status, error.code, error.message), status_code=error.status)


class Endpoints:
    """Handlers of requests with an attempt's token. All raise errors that `refused` turns into responses."""

    def __init__(self, services: GatewayServices) -> None:
        self._services = services

    async def account(self, request: Request) -> Response:
        """Returns the attempt's usage so far; `waited_s` includes calls that wait at this moment."""
        return await self._account(await self._session(request, ended_too=True))

    async def close(self, request: Request) -> Response:
        """Refuses new calls, waits for those under way (`?timeout_s=`), records all, and returns the account."""
        session = await self._session(request, ended_too=True)
        timeout_s = _seconds(request.query_params.get("timeout_s"))
        calls = self._services.attempts.of(session.attempt_id)
        calls.close()
        await self._services.callers.close_session(session.attempt_id)
        await _all_ended(calls, timeout_s)
        await self._services.recorder.flush(session.attempt_id)
        response = await self._account(session)
        if not calls.in_flight:
            self._services.recorder.forget(session.attempt_id)
        return response

    async def _session(self, request: Request, *, ended_too: bool = False) -> ModelSession:
        return await self._services.callers.session(token_of(request.scope["headers"]), ended_too=ended_too)

    async def _account(self, session: ModelSession) -> Response:
        """Returns the account as JSON that `app.workers.model_access` reads."""
        account = await self._services.recorder.account(session)
        calls = self._services.attempts.of(session.attempt_id)
        body = asdict(account) | {
            "gateway": self._services.boot,
            "waited_s": account.waited_s + calls.waiting_s(),
            "in_flight": calls.in_flight,
            "waiting": len(calls.waiting_since),
            "attempt_id": str(session.attempt_id),
            "closed": calls.closed or not session.live,
        }
        return JSONResponse(body)

    async def models(self, request: Request) -> Response:
        data = [model_entry(name) for name in await self._names(request)]
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return JSONResponse({"object": "list", "data": data, "has_more": False, "first_id": first, "last_id": last})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        names = await self._names(request)
        if name not in names:
            message = f"unknown model {name!r}; known by name: {', '.join(names) or 'none'}"
            raise CallRefusal(404, "model_not_found", message)
        return JSONResponse(model_entry(name))

    async def _names(self, request: Request) -> list[str]:
        model = (await self._session(request)).model
        return [name for name in dict.fromkeys((model.name, *model.side_models)) if name]

    async def count_tokens(self, request: Request) -> Response:
        """Estimates the tokens: which engine gets the call, and whether it can count, is not known yet."""
        session = await self._session(request)
        self._services.attempts.of(session.attempt_id).refuse_if_closed()
        raw = await read_body(request.receive, request.scope["headers"], self._services.body_bytes)
        refuse_other_models(session, read_request(raw)["model"])
        return JSONResponse({"input_tokens": max(1, len(raw) // _CHARACTERS)})


async def _all_ended(calls: AttemptCalls, timeout_s: float) -> None:
    give_up = time.monotonic() + timeout_s
    while calls.in_flight and (left_s := give_up - time.monotonic()) > 0:
        try:
            await calls.one_end(left_s)
        except TimeoutError:
            log.warning("gateway.calls_outlive_attempt", calls=calls.in_flight)
            return
    await asyncio.sleep(0)


def _seconds(value: str | None) -> float:
    try:
        seconds = CLOSE_S if value is None else float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _CLOSE_MOST_S:
        message = f"timeout_s: expected 0 to {_CLOSE_MOST_S:g} seconds, found {value!r}"
        raise CallRefusal(400, "invalid_request", message)
    return seconds
