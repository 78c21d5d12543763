"""Defines model calls as data: permissions, result, usage.

The gateway creates this data, the ledger stores it, the workers and the command line read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

from app.models.spec import Limits, ModelChoice

REPLAY_HEADER = "x-megaflow-replay"
"""Header in every response of a replay engine; gateways recognize the engine by it at any address. The value is the
source: a `script`, or a recording (`exact`, `position`: how the recorded call was found)."""


class Dialect(StrEnum):
    """API dialects by which agents call models; the value is the path of the call below the base URL."""

    CHAT = "chat/completions"  # OpenAI's chat completions
    RESPONSES = "responses"  # OpenAI's responses
    MESSAGES = "messages"  # Anthropic's messages


class CallEnd(StrEnum):
    """Ends of a call, as seen by the gateway; a closed set."""

    ANSWERED = "answered"
    REFUSED = "refused"  # the inference server returned 4xx: the request's fault
    CONTEXT_EXHAUSTED = "context_exhausted"  # the conversation no longer fits the model
    STEP_LIMIT = "step_limit"  # the attempt has used up its turns
    BUDGET_EXHAUSTED = "budget_exhausted"  # the attempt has used up its money
    RUN_BUDGET = "run_budget"  # the run has used up its money: an administrator's limit, attempt not counted
    THROTTLED = "throttled"  # a limit blocked the call until the longest wait was over
    UNAUTHORISED = "unauthorised"  # the inference server refused the gateway's key
    NOT_FOUND = "not_found"  # the inference server does not have the model
    UPSTREAM_BUSY = "upstream_busy"  # 429 or 529 until the longest wait was over
    UPSTREAM_ERROR = "upstream_error"  # 5xx, or an invalid response
    UPSTREAM_UNREACHABLE = "upstream_unreachable"  # no replica accepts connections
    UPSTREAM_TIMEOUT = "upstream_timeout"
    CUT = "cut"  # the connection closed in the middle of a response
    CLIENT_GONE = "client_gone"  # the agent closed the connection


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
"""Ends that are not the agent's fault: an attempt that stops because of them is not scored (promise 7)."""

LASTING_FAULTS = frozenset({CallEnd.UNAUTHORISED, CallEnd.NOT_FOUND})
"""Engine faults that another attempt would meet again."""


@dataclass(frozen=True, slots=True)
class TokenUse:
    """Tokens of one call as counted by the inference server; None: not reported. `cached` is a part of `prompt`."""

    prompt: int | None = None
    completion: int | None = None
    cached: int | None = None
    reasoning: int | None = None  # a part of `completion`
    stored: int | None = None  # a part of `prompt`: written to the server's cache; some providers charge more for it

    @property
    def total(self) -> int | None:
        return None if self.prompt is None or self.completion is None else self.prompt + self.completion


@dataclass(frozen=True, slots=True)
class ModelSession:
    """Session of a caller's token: one attempt and its limits."""

    attempt_id: UUID
    number: int
    task_id: UUID
    run_id: UUID
    user: str
    agent: str
    task_name: str
    replica: int
    model: ModelChoice
    limits: Limits  # those that concern the model
    live: bool  # False: the attempt has ended, or a newer attempt replaced it


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `start` to `end` (exclusive) of an answer or a sample, written by this version of the policy."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """Sampling options of an attempt as applied in one call."""

    applied: Mapping[str, Any] = field(default_factory=dict)  # option: value, as sent to the inference server
    dropped: tuple[str, ...] = ()  # the dialect or the model has no such field

    def __bool__(self) -> bool:
        return bool(self.applied or self.dropped)

    def describe(self) -> dict[str, Any]:
        return {"applied": dict(self.applied), "dropped": list(self.dropped)} if self else {}


@dataclass(frozen=True, slots=True)
class Exchange:
    """A call from beginning to end, as bytes; the gateway passes it to the recorder.

    `request` is the JSON that the agent sent. `response` is what it received (server-sent events when `streamed`).
    Times are seconds of a monotonic clock, from the arrival of the request.
    """

    id: UUID
    session: ModelSession
    dialect: Dialect
    started_at: datetime
    request: bytes
    response: bytes
    streamed: bool
    status: int | None  # HTTP status that the agent received; None: the agent had disconnected
    end: CallEnd
    detail: str = ""
    upstream_model: str = ""  # the inference server's name of it
    replica: str = ""  # URL of the model's replica
    policy_version: str = ""  # current version behind the stable name
    waited_s: dict[str, float] = field(default_factory=dict)  # by limit, before the request was sent
    first_byte_s: float | None = None
    duration_s: float = 0.0
    retries: int = 0  # by the gateway, invisible to the agent
    asked_model: str = ""  # name in the agent's request; "": the request could not be parsed
    built_in: bool = False  # answered by MegaFlow's own engine
    scripted: bool = False  # answered by any replay engine
    sampled: Sampled = field(default_factory=Sampled)


@dataclass(frozen=True, slots=True)
class Account:
    """Model usage of one attempt, run or user so far. `cost_usd` covers only the calls with a known price."""

    calls: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float = 0.0
    unpriced_calls: int = 0
    model_s: float = 0.0  # time spent by inference servers
    waited_s: float = 0.0  # time spent waiting for limits
    last_end: CallEnd | None = None  # of the newest call
    turn_end: CallEnd | None = None  # of the newest call that is a turn (as `turns` says), CLIENT_GONE left out
    stopped_by: CallEnd | None = None
    """STEP_LIMIT, BUDGET_EXHAUSTED, RUN_BUDGET or CONTEXT_EXHAUSTED, once a call was refused for this reason."""
    offered_tools: bool = False  # an answered call offered tools: then calls without tools are not turns
    last_cost_usd: float = 0.0  # of the newest call that cost something
    scripted_calls: int = 0  # answered by a replay engine
    gateway: str = ""  # id of the gateway process, if given: a new id means that the process was restarted

    def describe(self) -> dict[str, Any]:
        """Returns the usage as recorded with an attempt."""
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
        if self.cost_usd or not self.unpriced_calls:  # calls without cost, e.g. refused ones, have no price
            known["cost_usd"] = round(self.cost_usd, 6)
        return known
