"""Translates calls for engines that do not speak the caller's dialect, with litellm.

Nearly every engine speaks chat completions. Calls in that dialect to an engine without it are refused. litellm is
imported at the first call that needs it: it takes seconds and a hundred megabytes, and most gateways never need it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from app.model_service.dialects.reading import parse_json
from app.model_service.gateway import engine_faults
from app.model_service.serving import CallRefusal
from app.models.model_calls import Dialect

if TYPE_CHECKING:
    from app.model_service.gateway.translating import Messages, Responses

_SHOWN = 200


async def translation_for(asked: Dialect, spoken: Dialect) -> Messages | Responses:
    """Returns a translation. Raises: CallRefusal: none between these dialects, or litellm is not installed."""
    if spoken is not Dialect.CHAT or asked is Dialect.CHAT:
        raise CallRefusal(
            501,
            "not_translated",
            f"expected an engine that speaks {asked.value!r} or {Dialect.CHAT.value!r}, found one that speaks"
            f" {spoken.value!r}; route the model to another engine with `megaflow models add`",
        )
    try:
        translating = await _translating()
    except ImportError as error:
        raise CallRefusal(
            501,
            "not_translated",
            f"calls in {asked.value!r} are translated for this engine, and litellm, which does it, is not installed"
            f" ({error}); try `pip install '.[translate]'` in MegaFlow's checkout, where the gateway runs",
        ) from error
    translation: Messages | Responses = translating.Messages() if asked is Dialect.MESSAGES else translating.Responses()
    return translation


_LOADER = ThreadPoolExecutor(1, "gateway-translating")
_module: Future[Any] | None = None


async def _translating() -> Any:
    """Returns the module. It is imported once, in a thread, while every call that needs it waits: an import in the
    event loop would block all calls. Raises: ImportError."""
    global _module
    if _module is None or (_module.done() and _module.exception() is not None):
        _module = _LOADER.submit(_load)
    return await asyncio.shield(asyncio.wrap_future(_module))


def _load() -> Any:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices
    os.environ.setdefault("LITELLM_LOG", "ERROR")
    try:
        module = import_module("app.model_service.gateway.translating")
    except ImportError:
        raise
    except Exception as error:
        raise ImportError(f"{type(error).__name__}: {error}") from error
    with suppress(Exception):  # only saves time later
        module.warm()
    return module


class Interrupted(Exception):
    """The source ended early, or, if there is a `why`, is no valid stream of chat completions from there on."""

    def __init__(self, why: str = "") -> None:
        super().__init__(why)
        self.why = why


async def chunks_of(pieces: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Yields the valid chunks of a chat stream. Raises: Interrupted: it ended before it was complete."""
    rest = b""
    finished = False
    async for piece in pieces:
        rest = (rest + piece).replace(b"\r\n", b"\n")
        *events, rest = rest.split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                if not data:
                    continue
                if data == b"[DONE]":
                    return
                chunk = _chunk_of(data)
                finished = finished or any(one.get("finish_reason") for one in chunk.get("choices") or ())
                yield chunk
    if not finished:
        raise Interrupted


def _chunk_of(data: bytes) -> dict[str, Any]:
    try:
        chunk = parse_json(data)
    except ValueError:
        raise Interrupted(f"the engine sent a chunk that is no JSON: {_excerpt(data)}") from None
    if isinstance(chunk, dict) and chunk.get("error") is not None:
        raise Interrupted(
            f"the engine reported an error in the middle of its answer: {engine_faults.message_of(data).message}"
        )
    if not isinstance(chunk, dict) or not _well_formed(chunk):
        raise Interrupted(f"the engine sent something that is no chunk of chat completions: {_excerpt(data)}")
    return chunk


def _well_formed(chunk: dict[str, Any]) -> bool:
    """Whether a chunk has the shape that translators assume. Otherwise they fail midway or, worse, lose content."""
    choices = chunk.get("choices")
    if choices is None:
        return True
    if not isinstance(choices, list):
        return False
    for choice in choices:
        delta = choice.get("delta") if isinstance(choice, dict) else False
        if delta is None:
            continue
        if not isinstance(delta, dict) or not isinstance(delta.get("content"), str | list | None):
            return False
        calls = delta.get("tool_calls")
        if calls is not None and not (isinstance(calls, list) and all(_is_call(one) for one in calls)):
            return False
    return True


def _is_call(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    function = value.get("function")
    if function is None:
        return True
    return isinstance(function, dict) and all(isinstance(function.get(k), str | None) for k in ("name", "arguments"))


def _excerpt(data: bytes) -> str:
    return repr(data[:_SHOWN].decode(errors="replace"))
