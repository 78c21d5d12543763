"""Anthropic's count_tokens: asked of the engine where it can count, else estimated. Costs nothing and is no call."""

from __future__ import annotations

import aiohttp
import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.model_service.dialects import codec_for
from app.model_service.gateway.bodies import ClientGone, read_body, read_request
from app.model_service.gateway.callers import token_of
from app.model_service.gateway.enforcement import refuse_other_models
from app.model_service.gateway.parts import Parts
from app.model_service.gateway.refusals import CLOSED, Refusal
from app.model_service.gateway.routes import Routes
from app.models.model_calls import CallEnd, Dialect

_PATIENCE_S = 10.0
_CHARACTERS = 4
"""For one token, about, in English and in code."""


class TokenCounts:
    """One request's answer."""

    def __init__(self, parts: Parts, routes: Routes, http: aiohttp.ClientSession) -> None:
        self._parts = parts
        self._routes = routes
        self._http = http

    async def answer(self, request: Request) -> Response:
        try:
            session = await self._parts.callers.session(token_of(request.scope["headers"]))
            if self._parts.attempts.of(session.attempt_id).closed:
                raise Refusal(403, "session_closed", CLOSED, CallEnd.REFUSED)
            raw = await read_body(request.receive, request.scope["headers"], self._parts.body_bytes)
            body = read_request(raw)
            refuse_other_models(session, body["model"])
            await self._routes.known(_PATIENCE_S)
        except ClientGone:
            return Response(status_code=499)
        except (Refusal, TimeoutError) as error:
            status, code = (error.status, error.code) if isinstance(error, Refusal) else (503, "routes_unknown")
            return JSONResponse(codec_for(Dialect.MESSAGES).error(status, code, str(error)), status_code=status)
        stuck = dict(self._parts.attempts.of(session.attempt_id).stuck)
        try:
            target = self._routes.choose(session, body["model"], stuck)
        except Refusal:
            return _estimate(raw)
        if target is None or not target.speaks(Dialect.MESSAGES) or not target.engine.healthy:
            return _estimate(raw)
        if target.upstream_model is not None:
            raw = orjson.dumps({**body, "model": target.upstream_model})
        headers = self._parts.upstream.planner.headers(request.scope["headers"], target, Dialect.MESSAGES)
        try:
            timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
            async with self._http.post(
                target.engine.count_tokens, data=raw, headers=headers, timeout=timeout, allow_redirects=False
            ) as said:
                content = await said.read()
                if said.status == 200 and isinstance(orjson.loads(content).get("input_tokens"), int):
                    return Response(content, media_type="application/json")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, AttributeError):
            pass
        return _estimate(raw)


def _estimate(raw: bytes) -> Response:
    return JSONResponse({"input_tokens": max(1, len(raw) // _CHARACTERS)})
