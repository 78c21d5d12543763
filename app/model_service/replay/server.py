"""The engine's HTTP side: three dialects in front of scripts and recordings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import structlog
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from app.errors import SpecInvalid
from app.model_service.dialects import codec_for
from app.model_service.dialects.base import DialectCodec, Request
from app.model_service.dialects.reading import parsed
from app.model_service.replay.delivery import Answer, Delivery, Refusal, body_of, refused
from app.model_service.replay.recordings import Caller, Recordings
from app.model_service.replay.scenes import Scenes, estimated
from app.model_service.replay.script import ReplayError, listed, load_scripts
from app.models.model_calls import Dialect

log = structlog.get_logger(__name__)

MODEL = "replay"
_LONGEST = 64 << 20
_TOLD = ("messages", "input", "system", "instructions", "tools")
"""The keys of a request that hold what the model reads."""


def create_app(folders: Sequence[Path], recordings: Path | None = None) -> Starlette:
    """The engine over the scripts in `folders`, which are read now and not again, and the recorded runs below
    `recordings`, which are read when they are first asked for.

    Raises: SpecInvalid: a folder of scripts or a script is missing or malformed.
    """
    engine = _Engine(Scenes(load_scripts(folders)), Recordings(recordings))
    return Starlette(
        routes=[
            *(Route(f"/v1/{dialect}", engine.of(dialect), methods=["POST"]) for dialect in Dialect),
            Route("/v1/messages/count_tokens", engine.count_tokens, methods=["POST"]),
            Route("/v1/models", engine.models),
            Route("/v1/models/{name:path}", engine.model),
            Route("/health", engine.health),
        ]
    )


class _Engine:
    def __init__(self, scenes: Scenes, recordings: Recordings) -> None:
        self._scenes = scenes
        self._recordings = recordings

    async def health(self, request: HttpRequest) -> Response:
        return _json({"status": "ok", "scripts": self._scenes.names})

    async def models(self, request: HttpRequest) -> Response:
        return _json(
            {"object": "list", "data": [_model(MODEL)], "has_more": False, "first_id": MODEL, "last_id": MODEL}
        )

    async def model(self, request: HttpRequest) -> Response:
        return _json(_model(request.path_params["name"]))

    async def count_tokens(self, request: HttpRequest) -> Response:
        dialect = codec_for(Dialect.MESSAGES)
        try:
            body = await _body(request)
        except ReplayError as error:
            return _refused(dialect, error)
        return _json({"input_tokens": _prompt_tokens(body)})

    def of(self, dialect: Dialect) -> Any:
        """The endpoint that speaks `dialect`."""
        spoken = codec_for(dialect)

        async def endpoint(request: HttpRequest) -> Response:
            try:
                body = await _body(request)
                asked = _asked(spoken, body)
                answer = await self._answer(asked, body, _caller(request))
            except ReplayError as error:
                return _refused(spoken, error)
            return Delivery(answer, spoken, asked)

        return endpoint

    async def _answer(self, asked: Request, body: Mapping[str, Any], caller: Caller) -> Answer:
        kind, name = _named(asked.model)
        script = self._scenes.named(name) if kind else None
        if script is None and kind == "replay":
            return await self._recordings.answer(name, asked, caller, scripts=self._scenes.names)
        if script is None and kind:
            raise ReplayError(
                "scenario_unknown",
                f"expected a model of the name scenario-NAME with the name of a script; found {asked.model!r}; "
                f"known scripts: {listed(self._scenes.names)}",
            )
        tokens = _prompt_tokens(body)
        return self._scenes.play(asked, body, prompt_tokens=tokens, caller=caller.id, script=script)


def _named(model: str) -> tuple[str, str]:
    """What a model's name asks for: ("scenario", script), ("replay", recorded run or script), or nothing."""
    bare = model.rpartition("/")[2]  # some clients put a provider's name before it
    if bare.startswith("scenario-"):
        return "scenario", bare.removeprefix("scenario-")
    if bare.startswith("replay:"):
        return "replay", bare.removeprefix("replay:")
    return "", ""


def _caller(request: HttpRequest) -> Caller:
    headers = request.headers
    replica = headers.get("x-megaflow-replica", "")
    return Caller(
        id=headers.get("x-megaflow-attempt") or headers.get("authorization") or headers.get("x-api-key") or "",
        task=headers.get("x-megaflow-task"),
        replica=int(replica) if replica.isdecimal() else None,
        agent=headers.get("x-megaflow-agent", ""),
    )


async def _body(request: HttpRequest) -> dict[str, Any]:
    raw = await body_of(request, _LONGEST)
    if raw is None:
        raise ReplayError("request_too_large", f"expected a body of at most {_LONGEST} bytes; found more", status=413)
    try:
        body = parsed(raw)
    except ValueError as error:
        raise ReplayError("invalid_json", f"expected a JSON body; found: {error}", status=400) from error
    if not isinstance(body, dict):
        raise ReplayError("invalid_request", f"expected a JSON object; found {type(body).__name__}", status=400)
    return body


def _asked(dialect: DialectCodec, body: dict[str, Any]) -> Request:
    try:
        return dialect.request(body)
    except SpecInvalid as error:
        raise ReplayError("invalid_request", str(error), status=400) from error


def _refused(dialect: DialectCodec, error: ReplayError) -> Response:
    log.warning("replay.refused", code=error.code, status=error.status)
    return refused(dialect, Refusal(error.status, error.code, str(error)))


def _prompt_tokens(body: Mapping[str, Any]) -> int:
    return estimated(sum(len(orjson.dumps(body[key])) for key in _TOLD if body.get(key)))


def _model(name: str) -> dict[str, Any]:
    """A model as both OpenAI's and Anthropic's clients read it."""
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "megaflow"}
    return openai | {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _json(body: Mapping[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
