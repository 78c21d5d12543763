"""The replay engine: an OpenAI-compatible server that plays scripted conversations; tests and demos need no model.

    python -m app.model_service.replay --port 8791 --scripts folder/with/yaml/files

Any model name and any API key are accepted. `app.model_service.script` says what a script is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from app.errors import SpecInvalid
from app.model_service.script import (
    ReplayError,
    Reply,
    Script,
    Turn,
    choose,
    count_tokens,
    load_scripts,
    render,
    task_text,
)

log = structlog.get_logger(__name__)

MODEL = "replay"
_GARBAGE = "<html><body>This is not the completion you are looking for.</body></html>"
_GRACE_S = 1.0  # how long a stopping server waits for answers that are still being delayed


def create_app(folders: Sequence[Path]) -> Starlette:
    """The engine over the scripts in `folders`, which are read now and not again.

    Raises: SpecInvalid: a folder or a script is missing or malformed.
    """
    engine = _Engine(load_scripts(folders))
    return Starlette(
        routes=[
            Route("/health", engine.health),
            Route("/v1/models", engine.models),
            Route("/v1/chat/completions", engine.chat_completions, methods=["POST"]),
        ]
    )


class _Engine:
    """The three answers; holds nothing that changes."""

    def __init__(self, scripts: tuple[Script, ...]) -> None:
        self._scripts = scripts

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "scripts": [script.name for script in self._scripts]})

    async def models(self, request: Request) -> Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megaflow"}
        return JSONResponse({"object": "list", "data": [model]})

    async def chat_completions(self, request: Request) -> Response:
        try:
            body = _checked(await request.body())
            script, at = choose(self._scripts, body["messages"])
            turn = script.turns[at]
            await asyncio.sleep(turn.delay_s)
            if (fault := _fault(turn)) is not None:
                return fault
            reply = render(turn, task=task_text(body["messages"]), tools=body.get("tools") or [])
        except ReplayError as error:
            log.warning("replay.refused", code=error.code, status=error.status)
            return _error(error.status, error.code, str(error))
        completion = _completion(script, at, reply, body)
        if body.get("stream"):
            with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            return StreamingResponse(_events(completion, with_usage=with_usage), media_type="text/event-stream")
        return JSONResponse(completion)


def _checked(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise ReplayError("invalid_json", f"expected a JSON body; found: {error}", status=400) from error
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
        raise ReplayError("invalid_request", "expected `messages`, a list of objects that is not empty", status=400)
    return {**body}


def _fault(turn: Turn) -> Response | None:
    if turn.garbage:
        return Response(_GARBAGE, media_type="application/json")
    if turn.status is not None:
        return _error(turn.status, "scripted_fault", turn.message or f"the script asked for HTTP {turn.status}")
    return None


def _error(status: int, code: str, message: str) -> Response:
    # litellm reads the type before the status: a 404 called an invalid request is retried, a "not found" is not.
    kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
        status, "server_error" if status >= 500 else "invalid_request_error"
    )
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return JSONResponse(body, status_code=status)


def _completion(script: Script, at: int, reply: Reply, body: dict[str, Any]) -> dict[str, Any]:
    calls = _tool_calls(at, reply)
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if calls:
        message["tool_calls"] = calls
    prompt = count_tokens(body["messages"]) + (count_tokens(body["tools"]) if body.get("tools") else 0)
    answer = count_tokens(message)
    return {
        "id": f"chatcmpl-{script.name}-{at}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": str(body.get("model") or MODEL),
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer},
    }


def _tool_calls(at: int, reply: Reply) -> list[dict[str, Any]]:
    if reply.tool is None:
        return []
    return [
        {
            "id": f"call_{at}_{number}",
            "type": "function",
            "function": {"name": reply.tool, "arguments": json.dumps({"command": command})},
        }
        for number, command in enumerate(reply.commands)
    ]


async def _events(completion: dict[str, Any], *, with_usage: bool) -> AsyncIterator[str]:
    """The completion as server-sent events: role, words, one event per tool call, the finish, the usage if asked."""
    choice = completion["choices"][0]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, {"content": message["content"]}]
    deltas += [{"tool_calls": [{"index": number, **call}]} for number, call in enumerate(message.get("tool_calls", []))]
    shared = {key: completion[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for delta in deltas:
        yield _event({**shared, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield _event({**shared, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]})
    if with_usage:
        yield _event({**shared, "choices": [], "usage": completion["usage"]})
    yield "data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns 0, or the error's exit code when a script is malformed."""
    parser = argparse.ArgumentParser(prog="python -m app.model_service.replay", description=__doc__.split("\n")[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True, help="0 takes a free one; the log says which")
    parser.add_argument("--scripts", type=Path, nargs="+", required=True, metavar="DIR")
    arguments = parser.parse_args(argv)
    try:
        app = create_app(arguments.scripts)
    except SpecInvalid as error:
        print(f"replay: {error}", file=sys.stderr)
        return error.exit_code
    _serve(app, arguments.host, arguments.port)
    return 0


def _serve(app: Starlette, host: str, port: int) -> None:
    config = uvicorn.Config(
        app, host=host, port=port, log_level="warning", access_log=False, timeout_graceful_shutdown=int(_GRACE_S)
    )
    listener = config.bind_socket()
    log.info("replay.listening", host=host, port=listener.getsockname()[1])
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    sys.exit(main())
