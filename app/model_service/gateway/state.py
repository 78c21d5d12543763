"""State of running calls, per attempt and per call. Lost with the process."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from app.model_service.dialects.base import DialectCodec
from app.model_service.gateway.engines import Target
from app.model_service.gateway.waiting import Place
from app.model_service.serving import CallRefusal
from app.models.model_calls import CallEnd, Dialect, Exchange, ModelSession, Sampled

_FORGET_S = 900.0
_SWEEP_S = 60.0


@dataclass(slots=True)
class AttemptCalls:
    """State of one attempt's calls."""

    in_flight: int = 0
    under_way: int = 0  # of in_flight: allowed, and may cost money
    turns: int = 0  # of under_way: may become a turn, without tools
    tool_turns: int = 0  # of under_way: may become a turn, with tools
    stuck: dict[str, str] = field(default_factory=dict)
    """URL of the engine that serves the attempt, by route."""
    prompt_tokens: int = 0  # of the last answered turn, as its engine counted; next: bytes of its request
    prompt_bytes: int = 0
    waiting_since: dict[UUID, float] = field(default_factory=dict)  # by call
    kept_ids: dict[str, array[int]] = field(default_factory=dict)
    """Token ids of the newest conversations, prompt and answer, by a digest of their messages."""
    recalled: bool = False  # the recorded ids of an earlier process were read
    closed: bool = False
    began: float = field(default_factory=time.monotonic)
    used_at: float = field(default_factory=time.monotonic)
    _ended: asyncio.Event | None = None

    def enter(self) -> None:
        self.in_flight += 1

    def allow(self, *, turn: bool, tools: bool) -> None:
        """Counts an allowed call."""
        self.under_way += 1
        self.tool_turns += turn and tools
        self.turns += turn and not tools

    def leave(self, *, allowed: bool, turn: bool, tools: bool) -> None:
        self.in_flight -= 1
        self.under_way -= allowed
        self.tool_turns -= turn and tools
        self.turns -= turn and not tools
        self.used_at = time.monotonic()
        if self._ended is not None:
            self._ended.set()
            self._ended = None

    def close(self) -> None:
        """Refuses further calls."""
        self.closed = True
        self.used_at = time.monotonic()

    def refuse_if_closed(self) -> None:
        """Raises: CallRefusal."""
        if self.closed:
            raise CallRefusal(403, "session_closed", "the session of this attempt was closed; its calls are over")

    async def one_end(self, timeout_s: float) -> None:
        """Waits until a call of the attempt has ended. Raises: TimeoutError."""
        if self._ended is None:
            self._ended = asyncio.Event()
        async with asyncio.timeout(timeout_s):
            await self._ended.wait()

    def waiting_s(self) -> float:
        """Returns the seconds, all together, that calls under way have waited for limits and busy engines."""
        now = time.monotonic()
        return sum(now - since for since in self.waiting_since.values())


class Attempts:
    """State of all attempts with recent calls. For one event loop."""

    def __init__(self) -> None:
        self._by_id: dict[UUID, AttemptCalls] = {}
        self._swept_at = time.monotonic()

    def of(self, attempt_id: UUID) -> AttemptCalls:
        calls = self._by_id.get(attempt_id)
        if calls is None:
            self._sweep()
            calls = self._by_id[attempt_id] = AttemptCalls()
        return calls

    @property
    def in_flight(self) -> int:
        return sum(one.in_flight for one in self._by_id.values())

    async def all_ended(self, timeout_s: float) -> None:
        """Waits until no call is under way, at most `timeout_s`."""
        give_up = time.monotonic() + timeout_s
        while self.in_flight and time.monotonic() < give_up:
            await asyncio.sleep(0.02)

    def _sweep(self) -> None:
        now = time.monotonic()
        if now - self._swept_at < _SWEEP_S:
            return
        self._swept_at = now
        old = [key for key, one in self._by_id.items() if not one.in_flight and now - one.used_at > _FORGET_S]
        for key in old:
            del self._by_id[key]


Headers = list[tuple[bytes, bytes]]


@dataclass(slots=True)
class CallState:
    """State of one call, filled in while it runs. Times are of `time.monotonic`."""

    id: UUID
    session: ModelSession
    attempt: AttemptCalls
    dialect: Dialect
    codec: DialectCodec
    headers: Headers
    started_at: datetime
    begun: float
    patience_s: float
    raw: bytes = b""
    body: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    stream: bool = False
    tools: bool = False  # whether the request offers tools
    allowed: bool = False  # counted by its attempt as under way
    turn: bool = False  # counted as a possible turn
    target: Target | None = None
    attained_s: float = 0.0  # seconds of the attempt's calls at engines
    place: Place | None = None
    waited_s: dict[str, float] = field(default_factory=dict)
    retries: int = 0
    first_byte_s: float | None = None
    scripted: bool = False  # the last answer came from a replay engine
    sampled: Sampled = field(default_factory=Sampled)
    status: int | None = None
    end: CallEnd = CallEnd.UPSTREAM_ERROR
    detail: str = ""
    streamed: bool = False
    response: bytes = b""
    started: bool = False  # the status was sent to the caller
    whole: bool = False  # the engine's stream was complete
    recorded: bool = False
    clock: asyncio.Timeout | None = None  # limits the engines' time; stopped while the call waits
    silent_since: float | None = None  # start of the wait for the engine's next byte; None: no such wait
    waited_then_s: float = 0.0

    def left_s(self) -> float:
        """Returns the seconds that the call may still wait."""
        return self.patience_s - sum(self.waited_s.values())

    def await_bytes(self) -> None:
        """Starts the wait for the engine's next byte."""
        self.silent_since = time.monotonic()
        self.waited_then_s = sum(self.waited_s.values())

    def silent_s(self) -> float:
        """Returns the seconds without a byte from the engine, without the call's own waits in that time."""
        if self.silent_since is None:
            return 0.0
        return time.monotonic() - self.silent_since - (sum(self.waited_s.values()) - self.waited_then_s)

    @contextmanager
    def waiting(self, reason: str) -> Iterator[None]:
        """Counts the time of the block as waiting, for that reason."""
        begun = time.monotonic()
        self.attempt.waiting_since[self.id] = begun
        due = self.clock.when() if self.clock is not None else None
        if self.clock is not None and due is not None:
            self.clock.reschedule(None)
        try:
            yield
        finally:
            if self.clock is not None and due is not None and not self.clock.expired():
                self.clock.reschedule(due + time.monotonic() - begun)
            self.attempt.waiting_since.pop(self.id, None)
            self.waited_s[reason] = self.waited_s.get(reason, 0.0) + time.monotonic() - begun

    def engine_worked(self) -> bool:
        """Whether the engine generated tokens, even if their number is unknown."""
        return self.end is CallEnd.ANSWERED or (self.end is CallEnd.CLIENT_GONE and self.streamed)

    def exchange(self) -> Exchange:
        """Returns the record of the call."""
        target = self.target
        return Exchange(
            id=self.id,
            session=self.session,
            dialect=self.dialect,
            started_at=self.started_at,
            request=self.raw,
            response=self.response,
            streamed=self.streamed,
            status=self.status,
            end=self.end,
            detail=self.detail,
            upstream_model=(target.upstream_model or self.model) if target else "",
            replica=target.engine.url if target else "",
            policy_version=target.policy_version if target else "",
            waited_s={name: round(seconds, 4) for name, seconds in self.waited_s.items() if seconds > 0.0005},
            first_byte_s=self.first_byte_s,
            duration_s=time.monotonic() - self.begun,
            retries=self.retries,
            asked_model=self.model,
            built_in=target.built_in if target else False,
            scripted=self.scripted,
            sampled=self.sampled,
        )
