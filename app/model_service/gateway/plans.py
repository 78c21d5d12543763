"""Builds the request to an engine: body, sampling options, headers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from app.model_service.dialects import codec_for
from app.model_service.gateway.engines import Target
from app.model_service.gateway.keys import Keys
from app.model_service.gateway.state import CallState, Headers
from app.model_service.gateway.translation import translation_for
from app.models.engines import TRAITS, EngineKind
from app.models.model_calls import Dialect, Sampled
from app.models.spec import Sampling

if TYPE_CHECKING:
    from app.model_service.gateway.translating import Messages, Responses

_PLAIN = {
    Dialect.CHAT: ("temperature", "top_p", "seed"),
    Dialect.RESPONSES: ("temperature", "top_p"),
    Dialect.MESSAGES: ("temperature", "top_p"),
}
"""Options that the dialect has under the same name. The token limit has names of its own."""
_BOUNDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def with_sampling(
    body: dict[str, Any], dialect: Dialect, options: Sampling, *, most: int | None
) -> tuple[dict[str, Any], Sampled]:
    """Returns the request with these options, and which of them were applied.

    most: limit of the tokens of one answer of the attempt.
    """
    values = options.model_dump(exclude_none=True, exclude={"token_ids"})
    bound = values.pop("max_tokens", None)
    applied = {name: value for name, value in values.items() if name in _PLAIN[dialect]}
    merged = body | applied
    if bound is not None:
        bound = bound if most is None else min(bound, most)
        merged = codec_for(dialect).with_max_tokens(merged | {name: bound for name in _BOUNDS if name in merged}, bound)
        applied["max_tokens"] = bound
    return merged, Sampled(applied, tuple(name for name in values if name not in applied))


_PASSED = (b"anthropic-version", b"anthropic-beta", b"openai-beta")
_USAGE = {"include_usage": True}


@dataclass(slots=True)
class CallPlan:
    """Request to one engine."""

    target: Target
    dialect: Dialect  # of the request to the engine
    content: bytes
    translation: Messages | Responses | None = None
    sampled: Sampled = field(default_factory=Sampled)
    hides_usage: bool = False  # the gateway requested the stream's usage, not the caller
    hidden: frozenset[str] = frozenset()  # keys of the answer that only the gateway requested
    conversation: list[str] | None = None  # digests of its prefixes, if token ids are kept
    prompt_ids: list[int] | None = None  # sent as the prompt
    priority: bool = False  # the request has a priority


@dataclass(slots=True)
class EngineAnswer:
    """Answer of an engine: a whole body, or the beginning of a stream that continues in `response`. Must be closed."""

    plan: CallPlan
    status: int
    headers: Any  # of aiohttp
    content: bytes
    response: aiohttp.ClientResponse | None = None
    redact: Callable[[bytes], bytes] = bytes
    """Removes keys from an engine's texts."""

    def close(self) -> None:
        """Releases the engine, if necessary in the middle of its answer."""
        if self.response is not None:
            self.response.close()
            self.response = None
            self.plan.target.engine.window.leave()


async def make_plan(call: CallState, target: Target, *, dialect_refused: bool = False) -> CallPlan:
    """Builds the request for an engine: the caller's own bytes, if nothing has to be changed.

    dialect_refused: the engine has just refused the dialect.
    """
    body = call.body
    limits = call.session.limits
    if limits.max_turn_tokens is not None:
        body = call.codec.with_max_tokens(body, limits.max_turn_tokens)
    translation = None
    dialect = call.dialect
    sampling = call.session.model.sampling
    only_chat = sampling is not None and sampling.token_ids and _tells_ids_in_chat_alone(target, dialect)
    if dialect_refused or only_chat or not target.speaks(dialect):
        spoken = Dialect.CHAT if only_chat or not target.dialects else target.dialects[0]
        translation = await translation_for(dialect, spoken)
        body = translation.request(body)
        dialect = spoken
    if target.upstream_model is not None and target.upstream_model != call.model:
        body = {**body, "model": target.upstream_model}
    options = Sampled()
    if sampling is not None:
        body, options = with_sampling(body, dialect, sampling, most=limits.max_turn_tokens)
    hides = False
    if call.stream and dialect is Dialect.CHAT:
        stream_opts = body.get("stream_options")
        if not (isinstance(stream_opts, dict) and stream_opts.get("include_usage")):
            body = {**body, "stream_options": {**(stream_opts if isinstance(stream_opts, dict) else {}), **_USAGE}}
            hides = True
    unchanged = body is call.body or body == call.body
    return CallPlan(target, dialect, call.raw if unchanged else orjson.dumps(body), translation, options, hides)


def _tells_ids_in_chat_alone(target: Target, dialect: Dialect) -> bool:
    """Whether ids require chat completions although the engine speaks this dialect; replays answer as recorded."""
    return (
        dialect is not Dialect.CHAT and target.speaks(Dialect.CHAT) and target.traits is not TRAITS[EngineKind.REPLAY]
    )


def engine_headers(keys: Keys, caller_headers: Headers, target: Target, dialect: Dialect) -> dict[str, str]:
    """Returns the headers for an engine, without the caller's credentials."""
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "User-Agent": "megaflow-gateway"}
    for name, value in caller_headers:
        if name in _PASSED:
            headers[name.decode()] = value.decode("latin-1")
    key = keys.value(target.api_key_env)
    if key is not None:
        if dialect is Dialect.MESSAGES:
            headers["x-api-key"] = key
        if not (dialect is Dialect.MESSAGES and target.engine.anthropic):
            headers["Authorization"] = f"Bearer {key}"
    return headers


def call_headers(keys: Keys, call: CallState, plan: CallPlan) -> dict[str, str]:
    """Returns `engine_headers` of a call; the replay engine also gets task and attempt."""
    headers = engine_headers(keys, call.headers, plan.target, plan.dialect)
    if plan.target.built_in:
        headers["X-MegaFlow-Task"] = call.session.task_name
        headers["X-MegaFlow-Replica"] = str(call.session.replica)
        headers["X-MegaFlow-Agent"] = call.session.agent
        headers["X-MegaFlow-Attempt"] = str(call.session.attempt_id)
    return headers
