"""Model calls as data: who may call, how it went, what it used.

The gateway makes these facts, the ledger keeps them, the spine and the command line read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

from app.models.spec import ModelChoice

REPLAY_HEADER = "x-megaflow-replay"
"""In every answer of a replay engine, by which gateways know one at whatever address. Its value says where the answer
is from: a `script`, or a recording (`exact`, `position`: how it was found)."""


class Dialect(StrEnum):
    """The languages in which agents speak to models; the value is the path of the call below the base URL."""

    CHAT = "chat/completions"  # OpenAI's chat completions
    RESPONSES = "responses"  # OpenAI's responses
    MESSAGES = "messages"  # Anthropic's messages


class CallEnd(StrEnum):
    """How a call ended, as the gateway saw it; a closed set."""

    ANSWERED = "answered"
    REFUSED = "refused"  # the engine said 4xx: the request's fault
    CONTEXT_EXHAUSTED = "context_exhausted"  # it no longer fits the model
    STEP_LIMIT = "step_limit"  # the attempt has used up its turns
    BUDGET_EXHAUSTED = "budget_exhausted"  # the attempt has used up its money
    RUN_BUDGET = "run_budget"  # its run has: an administrator's limit, so the attempt is not counted
    THROTTLED = "throttled"  # a limit left no room for as long as one may wait
    UNAUTHORISED = "unauthorised"  # the engine did not take our key
    NOT_FOUND = "not_found"  # the engine does not have the model
    UPSTREAM_BUSY = "upstream_busy"  # 429 or 529, for as long as one may wait
    UPSTREAM_ERROR = "upstream_error"  # 5xx, garbage
    UPSTREAM_UNREACHABLE = "upstream_unreachable"  # no replica takes connections
    UPSTREAM_TIMEOUT = "upstream_timeout"
    CUT = "cut"  # the engine closed in the middle of an answer
    CLIENT_GONE = "client_gone"  # the agent hung up


ENGINE_FAULTS = frozenset(
    {
        CallEnd.THROTTLED,
        CallEnd.UNAUTHORISED,
        CallEnd.NOT_FOUND,
        CallEnd.UPSTREAM_BUSY,
        CallEnd.UPSTREAM_ERROR,
        CallEnd.UPSTREAM_UNREACHABLE,
        CallEnd.UPSTREAM_TIMEOUT,
        CallEnd.CUT,
    }
)
"""Ends that are not the agent's: an attempt that stops because of one is not scored (promise 7)."""

LASTING_FAULTS = frozenset({CallEnd.UNAUTHORISED, CallEnd.NOT_FOUND})
"""Those of them that another attempt would meet again."""


@dataclass(frozen=True, slots=True)
class TokenUse:
    """Tokens of one call as the engine counts them; None: it did not say. `cached` is a part of `prompt`."""

    prompt: int | None = None
    completion: int | None = None
    cached: int | None = None
    reasoning: int | None = None  # a part of `completion`
    stored: int | None = None  # a part of `prompt`: written to the engine's cache, which some charge more for

    @property
    def total(self) -> int | None:
        return None if self.prompt is None or self.completion is None else self.prompt + self.completion


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What one attempt may have of its model; None: not bounded."""

    max_turns: int | None = None  # answered calls that offer tools, or, without tools anywhere, all
    max_turn_tokens: int | None = None  # of one answer; larger wishes are cut to it
    context_tokens: int | None = None  # of prompt and answer together
    budget_usd: float | None = None


@dataclass(frozen=True, slots=True)
class ModelSession:
    """What a caller's token stands for: one attempt, and what it may do."""

    attempt_id: UUID
    number: int
    task_id: UUID
    run_id: UUID
    user: str
    agent: str
    task_name: str
    replica: int
    model: ModelChoice
    limits: ModelLimits
    live: bool  # False: the attempt has ended, or another has taken its place


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `start` to `end` (exclusive) of an answer, or of a sample, were written by this version of the policy."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """What became of the sampling options of an attempt in one call."""

    applied: Mapping[str, Any] = field(default_factory=dict)  # option: value, as the engine was asked
    dropped: tuple[str, ...] = ()  # the dialect or the model has no such field

    def __bool__(self) -> bool:
        return bool(self.applied or self.dropped)

    def describe(self) -> dict[str, Any]:
        return {"applied": dict(self.applied), "dropped": list(self.dropped)} if self else {}


@dataclass(frozen=True, slots=True)
class Exchange:
    """One call from beginning to end, as bytes: what the gateway hands to the recorder.

    `request` is the JSON that the agent sent, `response` what it got, as it came (server-sent events when `streamed`).
    Times are seconds of a monotonic clock, from the arrival of the request.
    """

    id: UUID
    session: ModelSession
    dialect: Dialect
    started_at: datetime
    request: bytes
    response: bytes
    streamed: bool
    status: int | None  # HTTP, as the agent saw it; None: it had gone
    end: CallEnd
    detail: str = ""
    upstream_model: str = ""  # by the engine's own name
    replica: str = ""  # of the model: its URL
    policy_version: str = ""  # behind the stable name at that moment
    waited_s: dict[str, float] = field(default_factory=dict)  # by limit, before the engine was asked
    first_byte_s: float | None = None
    duration_s: float = 0.0
    retries: int = 0  # of ours, unseen by the agent
    asked_model: str = ""  # by the agent's own word; "": the request could not be read
    built_in: bool = False  # the engine was the one that belongs to MegaFlow
    scripted: bool = False  # the answer came from a replay engine, whoever runs it
    sampled: Sampled = field(default_factory=Sampled)


@dataclass(frozen=True, slots=True)
class Account:
    """What one attempt, run or user has had of models so far. `cost_usd` is of the calls whose price is known."""

    calls: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float = 0.0
    unpriced_calls: int = 0
    model_s: float = 0.0  # time that engines took
    waited_s: float = 0.0  # time that limits took
    last_end: CallEnd | None = None  # of the newest call
    turn_end: CallEnd | None = None  # of the newest call that is a turn (as `turns` says), CLIENT_GONE left out
    stopped_by: CallEnd | None = None
    """STEP_LIMIT, BUDGET_EXHAUSTED, RUN_BUDGET or CONTEXT_EXHAUSTED, once a call was refused for it."""
    offered_tools: bool = False  # an answered call offered tools: those without are not turns
    last_cost_usd: float = 0.0  # of the newest call that cost something
    scripted_calls: int = 0  # answered by a replay engine
    gateway: str = ""  # which process of it says so, where one does: another name means that it has died in between

    def describe(self) -> dict[str, Any]:
        """As an attempt records it."""
        known = {
            "model_calls": self.calls,
            "turns": self.turns,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "model_s": round(self.model_s, 3),
            "waited_s": round(self.waited_s, 3),
        }
        if self.scripted_calls:
            known["scripted_calls"] = self.scripted_calls
        if self.cost_usd or not self.unpriced_calls:  # calls that cost nothing, e.g. refused ones, say no price
            known["cost_usd"] = round(self.cost_usd, 6)
        return known
