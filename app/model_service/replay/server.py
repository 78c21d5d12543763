"""The replay engine's HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import structlog
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from app.errors import SpecInvalid
from app.model_service.dialects import codec_for
from app.model_service.dialects.base import DialectCodec, Reply, Request
from app.model_service.replay.player import ReplayAnswer, ScriptPlayer, estimated_tokens, with_ids
from app.model_service.replay.recordings import Caller, Recordings
from app.model_service.replay.script import load_scripts, name_list
from app.model_service.serving import CallRefusal, ClientDisconnected, model_entry, read_body, read_request
from app.models.model_calls import REPLAY_HEADER, Dialect

log = structlog.get_logger(__name__)

MODEL = "replay"
_BODY_BYTES = 64 << 20
_PROMPT_KEYS = ("messages", "input", "system", "instructions", "tools")
"""Keys of a request whose values the model reads."""
_GARBAGE = b"<html><body>This is not the answer you are looking for.</body></html>"
_JSON = (b"content-type", b"application/json")
_EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
_IDS = {Dialect.CHAT: "chatcmpl-", Dialect.RESPONSES: "resp_", Dialect.MESSAGES: "msg_"}


def create_app(folders: Sequence[Path], recordings: Path | None = None) -> Starlette:
    """Creates the engine for the scripts in `folders`, which are read now and not again, and the recorded runs below
    `recordings`, which are read when they are first requested.

    Raises: SpecInvalid: a folder of scripts or a script is missing or malformed.
    """
    engine = _ReplayEngine(ScriptPlayer(load_scripts(folders)), Recordings(recordings))
    return Starlette(
        routes=[
            *(Route(f"/v1/{dialect}", engine.endpoint(dialect), methods=["POST"]) for dialect in Dialect),
            Route("/v1/messages/count_tokens", engine.count_tokens, methods=["POST"]),
            Route("/v1/models", engine.models),
            Route("/v1/models/{name:path}", engine.model),
            Route("/health", engine.health),
        ]
    )


class _ReplayEngine:
    def __init__(self, player: ScriptPlayer, recordings: Recordings) -> None:
        self._player = player
        self._recordings = recordings

    async def health(self, request: HttpRequest) -> Response:
        return _json({"status": "ok", "scripts": self._player.names})

    async def models(self, request: HttpRequest) -> Response:
        page = {"object": "list", "data": [model_entry(MODEL)], "has_more": False}
        return _json(page | {"first_id": MODEL, "last_id": MODEL})

    async def model(self, request: HttpRequest) -> Response:
        return _json(model_entry(request.path_params["name"]))

    async def count_tokens(self, request: HttpRequest) -> Response:
        try:
            return _json({"input_tokens": _prompt_tokens(await _body(request))})
        except CallRefusal as refusal:
            return _refused(codec_for(Dialect.MESSAGES), refusal)

    def endpoint(self, dialect: Dialect) -> Any:
        codec = codec_for(dialect)

        async def endpoint(http_request: HttpRequest) -> Response:
            try:
                body = await _body(http_request)
                try:
                    request = codec.request(body)
                except SpecInvalid as error:
                    raise CallRefusal(400, "invalid_request", str(error)) from error
                answer = await self._answer(request, body, _caller(http_request))
            except CallRefusal as refusal:
                log.warning("replay.refused", code=refusal.code, status=refusal.status)
                return _refused(codec, refusal)
            return _Delivery(answer, codec, request)

        return endpoint

    async def _answer(self, request: Request, body: Mapping[str, Any], caller: Caller) -> ReplayAnswer:
        kind, name = _model_kind(request.model)
        script = self._player.named(name) if kind else None
        if script is None and kind == "replay":
            return await self._recordings.answer(name, request, caller, scripts=self._player.names)
        if script is None and kind:
            raise CallRefusal(
                404,
                "scenario_unknown",
                f"expected a model of the name scenario-NAME with the name of a script; found {request.model!r}; "
                f"known scripts: {name_list(self._player.names)}",
            )
        answer = self._player.play(request, body, prompt_tokens=_prompt_tokens(body), script=script)
        return with_ids(answer, request)


def _model_kind(model: str) -> tuple[str, str]:
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
        task=headers.get("x-megaflow-task"),
        replica=int(replica) if replica.isdecimal() else None,
        agent=headers.get("x-megaflow-agent", ""),
    )


async def _body(request: HttpRequest) -> dict[str, Any]:
    try:
        return read_request(await read_body(request.receive, request.scope["headers"], _BODY_BYTES))
    except ClientDisconnected:
        raise CallRefusal(499, "client_gone", "the client hung up") from None


def _prompt_tokens(body: Mapping[str, Any]) -> int:
    return estimated_tokens(sum(len(orjson.dumps(body[key])) for key in _PROMPT_KEYS if body.get(key)))


def _json(body: Mapping[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")


def _refused(codec: DialectCodec, refusal: CallRefusal, source: str = "script") -> Response:
    body = orjson.dumps(codec.error(refusal.status, refusal.code, refusal.message))
    headers = {REPLAY_HEADER: source}
    if refusal.retry_after_s is not None:
        headers["retry-after"] = f"{refusal.retry_after_s:g}"
    return Response(body, refusal.status, headers, "application/json")


class _Delivery(Response):
    def __init__(self, answer: ReplayAnswer, codec: DialectCodec, request: Request) -> None:
        # Starlette's own set-up is left out: the headers are sent when the delay is over.
        self._answer = answer
        self._codec = codec
        self._request = request
        self._id = f"{_IDS[codec.dialect]}{answer.id}"
        self._source = (REPLAY_HEADER.encode(), answer.source.encode())
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._answer.delay_s and await _disconnected(receive, self._answer.delay_s):
            return
        content = self._answer.content
        if isinstance(content, CallRefusal):
            await _refused(self._codec, content, self._answer.source)(scope, receive, send)
        elif content is not None and self._request.stream:
            await self._stream(content, send)
        else:
            await self._whole(content, send)

    async def _whole(self, reply: Reply | None, send: Send) -> None:
        body = _GARBAGE
        if reply is not None:
            body = orjson.dumps(self._codec.whole(reply, id=self._id, request=self._request))
        await self._head(send, _JSON, (b"content-length", b"%d" % len(body)))
        if self._answer.cut:
            body = body[: len(body) // 2]  # unfinished: the server closes the connection
        await send({"type": "http.response.body", "body": body, "more_body": self._answer.cut})

    async def _stream(self, reply: Reply, send: Send) -> None:
        events = self._codec.events(reply, id=self._id, request=self._request)
        if self._answer.cut:
            events = _first_half(list(events))
        await self._head(send, _EVENTS)
        for event in events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        if not self._answer.cut:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _head(self, send: Send, *headers: tuple[bytes, bytes]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, self._source]})


def _first_half(events: Sequence[bytes]) -> Iterator[bytes]:
    middle = max(1, len(events) // 2)
    yield from events[:middle]
    yield events[middle][: len(events[middle]) // 2] if middle < len(events) else b""


async def _disconnected(receive: Receive, seconds: float) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while (await receive())["type"] != "http.disconnect":
                pass
            return True
    return False
