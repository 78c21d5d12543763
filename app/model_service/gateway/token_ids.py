"""Asks engines for token ids and log-probabilities, and hides from agents what they did not ask for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import orjson

from app.model_service.dialects import codec_for
from app.model_service.dialects.base import TOKENS, event, token_fields
from app.model_service.dialects.reading import list_or_empty, parse_json
from app.model_service.gateway.plans import CallPlan
from app.model_service.gateway.state import CallState
from app.model_service.serving import CallRefusal
from app.models.model_calls import CallEnd, Dialect

_BENDING = frozenset(
    (
        *("logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "top_p", "top_k", "min_p"),
        *("min_tokens", "bad_words", "allowed_token_ids", "logits_processors", "custom_logit_processor"),
    )
)
"""An agent's wishes that change which tokens are drawn, while engines tell log-probabilities of the model alone."""


def wants_ids(call: CallState, plan: CallPlan) -> bool:
    """Whether this call is to come back with token ids, which only chat completions have fields for."""
    options = call.session.model.sampling
    return options is not None and bool(options.token_ids) and plan.dialect is Dialect.CHAT


def ask_for_ids(plan: CallPlan, body: dict[str, Any]) -> dict[str, Any]:
    """The request with the engine's fields for ids, without prompt ids of the agent's own, and without `_BENDING`.

    Raises: CallRefusal: it is known to give none.
    """
    traits = plan.target.traits
    if traits.no_ids:
        message = f"{plan.target.engine.url}: {traits.no_ids}; expected vLLM or SGLang for training"
        raise CallRefusal(404, "no_token_ids", message, CallEnd.NOT_FOUND)
    plan.hidden = frozenset(key for name, keys in traits.asks if not body.get(name) for key in keys)
    bent = (_BENDING & body.keys()) - plan.sampled.applied.keys()
    plan.sampled = replace(plan.sampled, dropped=(*plan.sampled.dropped, *sorted(bent)))
    own = {name: value for name, value in body.items() if name not in {*bent, *traits.prompt_ids[:1]}}
    return own | {name: True for name, _ in traits.asks}


def with_prompt_ids(plan: CallPlan, body: dict[str, Any], ids: list[int]) -> dict[str, Any]:
    """The request with the ids of its prompt where its engine takes them."""
    *path, last = plan.target.traits.prompt_ids
    found: dict[str, Any] = {last: ids}
    for name in reversed(path):
        found = {name: found}
    return body | found


def without_keys(content: bytes, hidden: Collection[str]) -> bytes:
    """A chat answer, or a chunk of one, without these keys of its own and of its choices."""
    try:
        body = parse_json(content)
    except ValueError:
        return content
    if not isinstance(body, dict):
        return content
    for place in (body, *(one for one in list_or_empty(body.get("choices")) if isinstance(one, dict))):
        for key in hidden & place.keys():
            del place[key]
    return orjson.dumps(body)


def with_tokens(translated: bytes, told: bytes, *, streamed: bool) -> bytes:
    """A translated answer as it is recorded: with the ids that the engine told, which its dialect has no fields for."""
    try:
        fields = token_fields(codec_for(Dialect.CHAT).reply(told, streamed=streamed))
    except ValueError:
        return translated
    if streamed:
        return translated and translated + event({"type": TOKENS} | fields, TOKENS)
    return orjson.dumps(parse_json(translated) | fields)


async def without_keys_in_stream(pieces: AsyncIterator[bytes], hidden: Collection[str]) -> AsyncIterator[bytes]:
    """The same of a stream, line by line; engines write an event's JSON in one."""
    rest = b""
    async with aclosing(pieces) as source:  # type: ignore[type-var]
        async for piece in source:
            *lines, rest = (rest + piece).split(b"\n")
            if lines:
                yield b"".join(_shown(line, hidden) + b"\n" for line in lines)
    if rest:
        yield _shown(rest, hidden)


def _shown(line: bytes, hidden: Collection[str]) -> bytes:
    data = line.removeprefix(b"data:").strip()
    return b"data: " + without_keys(data, hidden) if line.startswith(b"data:") and data.startswith(b"{") else line
