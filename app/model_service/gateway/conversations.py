"""Keeps the token ids of conversations, so that a prompt begins with the very ids that the model wrote.

An engine renders a conversation anew for every call, and may write an answer otherwise than its model did. Where a call
takes the ids of its prompt, it gets those that are kept, then those of the new messages, which are found by rendering:
with the whole conversation, and with what is known of it alone. Where that leaves a doubt, nothing is sent in: the
sample breaks there, and is counted. What a killed gateway kept is read again from what it recorded.
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
"""Conversations of an attempt whose ids are kept: the newest. Four bytes for a token."""
_TIMEOUT = aiohttp.ClientTimeout(total=10.0)
_MOST_BYTES = 16 << 20
_TEMPLATE = ("model", "tools", "chat_template", "chat_template_kwargs")
"""What of a call an engine's template reads beside its messages."""
_MODELS = 1024


class Conversations:
    """Prompt ids for calls that go on from earlier ones. For one event loop."""

    def __init__(
        self, http: aiohttp.ClientSession, keys: Keys, database: Database, count: Callable[[str], None]
    ) -> None:
        """count: hears of each call that goes on what became of it: `unchanged`, `sent`, `broken` or `ignored`."""
        self._http = http
        self._keys = keys
        self._database = database
        self._count = count
        self._closings: dict[tuple[str, str], tuple[int, ...]] = {}  # by engine and model

    async def prompt_ids(self, call: CallState, plan: CallPlan, body: dict[str, Any]) -> list[int] | None:
        """What to send in as the ids of this call's prompt; None: nothing."""
        digests = plan.conversation = _digests(body)
        if not call.attempt.recalled and any(one.get("role") == "assistant" for one in body["messages"]):
            call.attempt.recalled = True
            await self._recall(call, body, digests[0])
        end = next((at for at in range(len(digests) - 1, 0, -1) if digests[at] in call.attempt.kept_ids), None)
        if end is None:
            return None
        kept = call.attempt.kept_ids[digests[end]].tolist()
        target, messages = plan.target, list_or_empty(body["messages"])
        whole = await self._render(target, body, messages, prompt=True)
        if whole is not None and whole[: len(kept)] == kept:
            self._count("unchanged")
            return None
        known = await self._render(target, body, messages[:end], prompt=False) if whole else None
        closing = await self._closing(target, body) if known else None
        if not whole or not known or closing is None or whole[: len(known)] != known or not _ends(known, closing):
            self._count("broken")
            return None
        written = next(n for n in range(len(closing), -1, -1) if _ends(kept, closing[:n]))
        self._count("sent")
        plan.prompt_ids = [*kept, *closing[written:], *whole[len(known) :]]
        return plan.prompt_ids

    def learn(self, call: CallState, plan: CallPlan, content: bytes, *, streamed: bool) -> None:
        """An answer has come to its end: the next call may go on from it."""
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
        """Keep what is on record of the conversations with this call's model and tools, which begin with `start`."""

        def read() -> list[StoredCall]:
            with self._database.begin() as connection:
                return calls_of(connection, call.session.attempt_id, _KEPT)

        try:
            found = await asyncio.to_thread(read)
        except DatabaseUnavailable:
            call.attempt.recalled = False  # the next call tries again
            self._count("broken")
            return
        tools = codec_for(Dialect.CHAT).request(body).tools
        for one in found:
            same = (one.upstream_model, one.tools) == (body["model"], tools)
            if same and one.reply and one.complete and one.prompt_token_ids and one.token_ids:
                digests = _chain(start, [*one.messages, one.reply])
                if digests[-1] not in call.attempt.kept_ids:
                    _keep(call, digests[-1], one.prompt_token_ids, one.token_ids)

    async def _closing(self, target: Target, body: dict[str, Any]) -> tuple[int, ...] | None:
        """The ids that the template writes after an answer: those at the end of two that have nothing in common."""
        key = (target.engine.url, str(body["model"]))
        if key not in self._closings:
            question = {"role": "user", "content": "?"}
            answers = [
                await self._render(target, body, [question, {"role": "assistant", "content": said}], prompt=False)
                for said in ("a", "b")
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
        """The messages as the engine's template writes them; None: it does not say.

        prompt: with the beginning of the next answer.
        """
        said = {key: body[key] for key in _TEMPLATE if key in body}
        said |= {"messages": messages, "add_generation_prompt": prompt}
        url = target.engine.url.removesuffix("/v1") + target.traits.render
        headers = engine_headers(self._keys, [], target, Dialect.CHAT)
        try:
            async with self._http.post(
                url, data=orjson.dumps(said), headers=headers, timeout=_TIMEOUT, allow_redirects=False
            ) as answer:
                content = await whole_of(answer, _MOST_BYTES) if answer.status == 200 else None
            ids = whole_numbers(body_of(content).get("tokens")) if content else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None
        return None if ids is None else list(ids)


def _digests(body: dict[str, Any]) -> list[str]:
    """Of each beginning of the conversation, the empty one first; calls with other tools are other conversations."""
    start = exact_digest([body.get(key) for key in _TEMPLATE])
    return _chain(start, codec_for(Dialect.CHAT).request(body).messages)


def _chain(start: str, messages: Sequence[Message]) -> list[str]:
    found = [start]
    for message in messages:
        found.append(exact_digest([found[-1], meaning_digest(message)]))
    return found


def _keep(call: CallState, digest: str, prompt: Sequence[int], answer: Sequence[int]) -> None:
    kept = call.attempt.kept_ids
    try:
        kept[digest] = array("I", [*prompt, *answer])
    except OverflowError:  # no ids of tokens: who makes samples says so
        return
    while len(kept) > _KEPT:
        del kept[next(iter(kept))]


def _ends(ids: Sequence[int], end: Sequence[int]) -> bool:
    return len(end) <= len(ids) and list(ids[len(ids) - len(end) :]) == list(end)


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
