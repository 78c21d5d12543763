"""The list of models, in one shape that the clients of both families read."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.model_service.dialects import codec_for
from app.model_service.gateway.callers import token_of
from app.model_service.gateway.parts import Parts
from app.model_service.gateway.refusals import Refusal
from app.models.model_calls import CallEnd, Dialect

_EPOCH = "1970-01-01T00:00:00Z"


class Listing:
    """What the caller may ask for by name: the model of its task, and those that were allowed beside it."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def all(self, request: Request) -> Response:
        try:
            data = [_entry(name) for name in await self._names(request)]
        except Refusal as refusal:
            return refused(request, refusal)
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return JSONResponse({"object": "list", "data": data, "has_more": False, "first_id": first, "last_id": last})

    async def one(self, request: Request) -> Response:
        name = request.path_params["name"]
        try:
            known = await self._names(request)
            if name not in known:
                shown = ", ".join(known) or "none"
                message = f"unknown model {name!r}; known by name: {shown}"
                raise Refusal(404, "model_not_found", message, CallEnd.REFUSED)
        except Refusal as refusal:
            return refused(request, refusal)
        return JSONResponse(_entry(name))

    async def _names(self, request: Request) -> list[str]:
        session = await self._parts.callers.session(token_of(request.scope["headers"]))
        return [name for name in dict.fromkeys((session.model.name, *session.model.side_models)) if name]


def _entry(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "megaflow",
        "type": "model",
        "display_name": name,
        "created_at": _EPOCH,
    }


def refused(request: Request, refusal: Refusal) -> Response:
    """In the dialect that the caller's headers speak of."""
    dialect = Dialect.MESSAGES if "anthropic-version" in request.headers else Dialect.CHAT
    body = codec_for(dialect).error(refusal.status, refusal.code, refusal.message)
    return JSONResponse(body, status_code=refusal.status)
