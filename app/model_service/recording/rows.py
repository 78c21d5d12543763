"""Converts an exchange's bytes into rows of the ledger. No I/O; unreadable bytes are kept as they are."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any
from uuid import UUID

from app.errors import SpecInvalid
from app.ledger.model_calls import NewCall, packed
from app.model_service.dialects import Reply, Request, codec_for
from app.model_service.dialects.base import exact_digest
from app.model_service.dialects.reading import body_of
from app.models.model_calls import CallEnd, Exchange, TokenUse, VersionSpan

_OFFERS = re.compile(rb'"tools"\s*:\s*\[\s*[^\s\]]')
PARTLY = frozenset({CallEnd.ANSWERED, CallEnd.CUT, CallEnd.CLIENT_GONE, CallEnd.UPSTREAM_TIMEOUT})
"""Ends after which the response may be an answer, or the beginning of one."""
_SAME = (
    *("id", "upstream_model", "replica", "policy_version", "started_at", "first_byte_s", "duration_s", "retries"),
    *("streamed", "status", "detail", "scripted"),
)
"""Fields of an exchange that become columns unchanged."""
_MOST_RAW = 1 << 20
"""Limit of bytes stored from an unreadable body."""
_ATTEMPTS = 2048
"""Number of attempts whose digests are remembered; messages of other attempts are packed again, without need."""


def has_tools(request: bytes) -> bool:
    """Whether a request offers tools, detected without parsing: quotes within texts are escaped."""
    return _OFFERS.search(request) is not None


@dataclass(frozen=True, slots=True)
class CountedExchange:
    """An exchange with its tokens, cost and flags when it was recorded."""

    exchange: Exchange
    use: TokenUse
    cost_usd: float | None
    is_turn: bool
    offers_tools: bool = False
    settles_turns: bool = False
    given_up: str = ""  # why its bodies were dropped

    @property
    def size(self) -> int:
        return len(self.exchange.request) + len(self.exchange.response)


class WrittenDigests:
    """Written digests by attempt, for a limited number of attempts."""

    def __init__(self) -> None:
        self._known: OrderedDict[UUID, set[str]] = OrderedDict()

    def of(self, attempt_id: UUID) -> set[str]:
        digests = self._known.setdefault(attempt_id, set())
        self._known.move_to_end(attempt_id)
        while len(self._known) > _ATTEMPTS:
            self._known.popitem(last=False)
        return digests

    def written(self, call: NewCall) -> None:
        self.of(call.facts["attempt_id"]).update(call.messages)

    def forget(self, attempt_id: UUID) -> None:
        self._known.pop(attempt_id, None)


def row_of(counted: CountedExchange, known: set[str]) -> NewCall:
    """Builds the row of a call, and its messages whose digests are not in `known`."""
    exchange = counted.exchange
    messages: dict[str, bytes] = {}

    def keep(value: Any) -> str:
        digest = exact_digest(value)
        if digest not in known and digest not in messages:
            messages[digest] = packed(value)
        return digest

    body: dict[str, Any] = {}
    if exchange.sampled:
        body["sampling"] = exchange.sampled.describe()
    facts = _facts(counted)
    if counted.given_up:
        body["lost"] = counted.given_up
    else:
        request = _read_request(exchange, body)
        reply = _reply(exchange, body)
        if request is not None:
            facts |= {"model": request.model, "messages": [keep(message) for message in request.messages]}
            tools = keep(list(request.tools)) if request.tools else None
            optional = {"tools": tools, "max_tokens": request.max_tokens}
            body["parameters"] = request.parameters
            body |= {name: value for name, value in optional.items() if value is not None}
        if reply is not None:
            facts |= {"reply": keep(reply.message), "finish_reason": reply.finish_reason}
            tokens = {name: getattr(reply, name) for name in ("prompt_token_ids", "token_ids", "logprobs")}
            body["complete"] = reply.complete
            if reply.token_ids is not None:
                all_of_it = (VersionSpan(exchange.policy_version, 0, len(reply.token_ids)),)
                body["versions"] = [asdict(span) for span in reply.versions or all_of_it]
            body |= {name: value for name, value in tokens.items() if value is not None}
    return NewCall({**facts, "body": packed(body)}, messages, counted.settles_turns)


def bare_row_of(counted: CountedExchange, why: str) -> NewCall:
    """Builds a row with only the values that need no parsing."""
    return NewCall({**_facts(counted), "body": packed({"lost": why})}, settles_turns=counted.settles_turns)


def _facts(counted: CountedExchange) -> dict[str, Any]:
    exchange, session, use = counted.exchange, counted.exchange.session, counted.use
    return {
        **{name: getattr(exchange, name) for name in _SAME},
        "attempt_id": session.attempt_id,
        "task_id": session.task_id,
        "run_id": session.run_id,
        "user_name": session.user,
        "dialect": exchange.dialect.value,
        "model": exchange.asked_model or session.model.name,
        "waited": dict(exchange.waited_s),
        "end_kind": exchange.end.value,
        "finish_reason": "",
        "is_turn": counted.is_turn,
        "offers_tools": counted.offers_tools,
        "prompt_tokens": use.prompt,
        "completion_tokens": use.completion,
        "cached_tokens": use.cached,
        "reasoning_tokens": use.reasoning,
        "cost_usd": counted.cost_usd,
        "messages": [],
        "reply": None,
    }


def _read_request(exchange: Exchange, body: dict[str, Any]) -> Request | None:
    try:
        return codec_for(exchange.dialect).request(body_of(exchange.request))
    except (ValueError, SpecInvalid, RecursionError) as error:
        body.setdefault("raw", {})["request"] = _raw(exchange.request)
        body["unread"] = f"request: {error}"[:300]
        return None


def _reply(exchange: Exchange, body: dict[str, Any]) -> Reply | None:
    if not exchange.response:
        return None
    if exchange.end in PARTLY:
        try:
            return codec_for(exchange.dialect).reply(exchange.response, streamed=exchange.streamed)
        except (ValueError, RecursionError) as error:
            body["unread"] = f"response: {error}"[:300]
    body.setdefault("raw", {})["response"] = _raw(exchange.response)
    return None


def _raw(content: bytes) -> str:
    """Decodes bytes, with replacements. PostgreSQL does not look into the result, so a NUL does no harm."""
    return content[:_MOST_RAW].decode("utf-8", "replace")
