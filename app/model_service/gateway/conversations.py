"""Keeps the token ids of conversations: a later prompt then begins with exactly the ids that the model wrote.

An engine renders a conversation anew for every call, and may tokenize an answer differently from its model. If an
engine accepts prompt ids, it gets the kept ids, then the ids of the new messages. Those are found by rendering twice:
the whole conversation, and its known beginning alone. If the result is doubtful, no ids are sent: the sample breaks
there, and is counted. After a gateway was killed, its ids are read again from the recorded calls.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import aiohttp
import orjson

from app.errors import DatabaseUnavailable
from app.ledger.database import Database
from app.ledger.model_calls import StoredCall, calls_of
from app.model_service.dialects import codec_for
from app.model_service.dialects.base import TOKENS, Message, Reply, event, exact_digest, meaning_digest, token_fields
from app.model_service.dialects.reading import body_of, list_or_empty, parse_json, whole_numbers
from app.model_service.gateway.engine_faults import whole_of
from app.model_service.gateway.engines import Target
from app.model_service.gateway.keys import Keys
from app.model_service.gateway.plans import CallPlan, engine_headers
from app.model_service.gateway.state import CallState
from app.model_service.serving import CallRefusal
from app.models.model_calls import CallEnd, Dialect

_KEPT = 8
"""Number of an attempt's newest conversations whose ids are kept, at four bytes per token."""
_TIMEOUT = aiohttp.ClientTimeout(total=10.0)
_MOST_BYTES = 16 << 20
_TEMPLATE = ("model", "tools", "chat_template", "chat_template_kwargs")
"""Request fields that an engine's chat template reads in addition to the messages."""
_MODELS = 1024


class Conversations:
    """Prompt ids for calls that continue earlier ones. For one event loop."""

    def __init__(
        self, http: aiohttp.ClientSession, keys: Keys, database: Database, count: Callable[[str], None]
    ) -> None:
        """count: called with the outcome of each continued call: `unchanged`, `sent`, `broken` or `ignored`."""
        self._http = http
        self._keys = keys
        self._database = database
        self._count = count
        self._closings: dict[tuple[str, str], tuple[int, ...]] = {}  # by engine and model

    async def prompt_ids(self, call: CallState, plan: CallPlan, body: dict[str, Any]) -> list[int] | None:
        """Returns the ids to send as this call's prompt. None: send none."""
        digests = plan.conversation = _digests(body)
        if not call.attempt.recalled and any(one.get("role") == "assistant" for one in body["messages"]):
            call.attempt.recalled = True
            await self._recall(call, body, digests[0])
        end = next((at for at in range(len(digests) - 1, 0, -1) if digests[at] in call.attempt.kept_ids), None)
        if end is None:
            return None
        prefix = call.attempt.kept_ids[digests[end]].tolist()
        target, messages = plan.target, list_or_empty(body["messages"])
        whole = await self._render(target, body, messages, prompt=True)
        if whole is not None and whole[: len(prefix)] == prefix:
            self._count("unchanged")
            return None
        known = await self._render(target, body, messages[:end], prompt=False) if whole else None
        closing = await self._closing(target, body) if known else None
        if not whole or not known or closing is None or whole[: len(known)] != known or not _ends(known, closing):
            self._count("broken")
            return None
        overlap = next(n for n in range(len(closing), -1, -1) if _ends(prefix, closing[:n]))
        self._count("sent")
        plan.prompt_ids = [*prefix, *closing[overlap:], *whole[len(known) :]]
        return plan.prompt_ids

    def learn(self, call: CallState, plan: CallPlan, content: bytes, *, streamed: bool) -> None:
        """Keeps the ids of a complete answer: the next call may continue from it."""
        if plan.conversation is None:
            return
        try:
            reply: Reply = codec_for(Dialect.CHAT).reply(content, streamed=streamed)
        except ValueError:
            return
        if reply.prompt_token_ids is None or not reply.token_ids or not reply.complete:
            return
        if plan.prompt_ids is not None and list(reply.prompt_token_ids) != plan.prompt_ids:
            self._count("ignored")
        digest = exact_digest([plan.conversation[-1], meaning_digest(reply.message)])
        _keep(call, digest, reply.prompt_token_ids, reply.token_ids)

    async def _recall(self, call: CallState, body: dict[str, Any], start: str) -> None:
        """Keeps the ids of recorded conversations with this call's model and tools, which begin with `start`."""

        def read() -> list[StoredCall]:
            with self._database.begin() as connection:
                return calls_of(connection, call.session.attempt_id, _KEPT)

        try:
            rows = await asyncio.to_thread(read)
        except DatabaseUnavailable:
            call.attempt.recalled = False  # the next call tries again
            self._count("broken")
            return
        tools = codec_for(Dialect.CHAT).request(body).tools
        for one in rows:
            same = (one.upstream_model, one.tools) == (body["model"], tools)
            if same and one.reply and one.complete and one.prompt_token_ids and one.token_ids:
                digests = _chain(start, [*one.messages, one.reply])
                if digests[-1] not in call.attempt.kept_ids:
                    _keep(call, digests[-1], one.prompt_token_ids, one.token_ids)

    async def _closing(self, target: Target, body: dict[str, Any]) -> tuple[int, ...] | None:
        """Returns the ids that the template writes after an answer: the common ending of two different answers."""
        key = (target.engine.url, str(body["model"]))
        if key not in self._closings:
            question = {"role": "user", "content": "?"}
            answers = [
                await self._render(target, body, [question, {"role": "assistant", "content": text}], prompt=False)
                for text in ("a", "b")
            ]
            if answers[0] is None or answers[1] is None:
                return None
            common = 0
            for one, other in zip(reversed(answers[0]), reversed(answers[1]), strict=False):
                if one != other:
                    break
                common += 1
            if len(self._closings) >= _MODELS:
                self._closings.clear()
            self._closings[key] = tuple(answers[0][len(answers[0]) - common :])
        return self._closings[key]

    async def _render(
        self, target: Target, body: dict[str, Any], messages: Sequence[Any], *, prompt: bool
    ) -> list[int] | None:
        """Returns the ids of the messages as the engine's template renders them. None: the engine does not return them.

        prompt: also render the beginning of the next answer.
        """
        request = {key: body[key] for key in _TEMPLATE if key in body}
        request |= {"messages": messages, "add_generation_prompt": prompt}
        url = target.engine.url.removesuffix("/v1") + target.traits.render
        headers = engine_headers(self._keys, [], target, Dialect.CHAT)
        try:
            async with self._http.post(
                url, data=orjson.dumps(request), headers=headers, timeout=_TIMEOUT, allow_redirects=False
            ) as answer:
                content = await whole_of(answer, _MOST_BYTES) if answer.status == 200 else None
            ids = whole_numbers(body_of(content).get("tokens")) if content else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None
        return None if ids is None else list(ids)


def _digests(body: dict[str, Any]) -> list[str]:
    """Returns a digest of each prefix of a conversation, the empty one first. Other tools make another conversation."""
    start = exact_digest([body.get(key) for key in _TEMPLATE])
    return _chain(start, codec_for(Dialect.CHAT).request(body).messages)


def _chain(start: str, messages: Sequence[Message]) -> list[str]:
    digests = [start]
    for message in messages:
        digests.append(exact_digest([digests[-1], meaning_digest(message)]))
    return digests


def _keep(call: CallState, digest: str, prompt: Sequence[int], answer: Sequence[int]) -> None:
    cache = call.attempt.kept_ids
    try:
        cache[digest] = array("I", [*prompt, *answer])
    except OverflowError:  # not token ids: the code that makes samples reports it
        return
    while len(cache) > _KEPT:
        del cache[next(iter(cache))]


def _ends(ids: Sequence[int], end: Sequence[int]) -> bool:
    return len(end) <= len(ids) and list(ids[len(ids) - len(end) :]) == list(end)


_BENDING = frozenset(
    (
        *("logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "top_p", "top_k", "min_p"),
        *("min_tokens", "bad_words", "allowed_token_ids", "logits_processors", "custom_logit_processor"),
    )
)
"""Request options that change how tokens are sampled, while engines report log-probabilities of the model alone."""


def wants_ids(call: CallState, plan: CallPlan) -> bool:
    """Whether this call needs token ids in its answer. Only chat completions have fields for them."""
    options = call.session.model.sampling
    return options is not None and bool(options.token_ids) and plan.dialect is Dialect.CHAT


def ask_for_ids(plan: CallPlan, body: dict[str, Any]) -> dict[str, Any]:
    """Adds the engine's fields for ids to a request, and drops the agent's own prompt ids and `_BENDING`.

    Raises: CallRefusal: the engine is known to return no ids.
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
    """Adds the prompt's ids to a request, in the field that its engine reads."""
    *path, last = plan.target.traits.prompt_ids
    fields: dict[str, Any] = {last: ids}
    for name in reversed(path):
        fields = {name: fields}
    return body | fields


def without_keys(content: bytes, hidden: Collection[str]) -> bytes:
    """Removes these keys from a chat answer or a chunk of one, and from its choices."""
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
    """Adds the engine's token ids to a translated answer for the record: its dialect has no fields for them."""
    try:
        fields = token_fields(codec_for(Dialect.CHAT).reply(told, streamed=streamed))
    except ValueError:
        return translated
    if streamed:
        return translated and translated + event({"type": TOKENS} | fields, TOKENS)
    return orjson.dumps(parse_json(translated) | fields)


async def without_keys_in_stream(pieces: AsyncIterator[bytes], hidden: Collection[str]) -> AsyncIterator[bytes]:
    """Removes these keys from a stream, line by line: engines write an event's JSON in one line."""
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
