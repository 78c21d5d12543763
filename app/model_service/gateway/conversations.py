"""Keeps the token ids of conversations, so that a prompt begins with the very ids that the model wrote.

An engine renders a conversation anew for every call, and may write an answer otherwise than its model did. Where a call
takes the ids of its prompt, it gets those that are kept, then those of the new messages, which are found by rendering:
with the whole conversation, and with what is known of it alone. Where that leaves a doubt, nothing is sent in: the
sample breaks there, and is counted. What a killed gateway kept is read again from what it recorded.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import orjson

from app.errors import DatabaseUnavailable
from app.ledger.database import Database
from app.ledger.model_calls import StoredCall, calls_of
from app.model_service.dialects import codec_for
from app.model_service.dialects.base import Message, Reply
from app.model_service.dialects.identity import exact_digest, meaning_digest
from app.model_service.dialects.reading import body_of, list_or_empty, whole_numbers
from app.model_service.gateway.engine_faults import whole_of
from app.model_service.gateway.engines import Target
from app.model_service.gateway.keys import Keys
from app.model_service.gateway.plans import CallPlan, engine_headers
from app.model_service.gateway.state import CallState
from app.models.model_calls import Dialect

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
