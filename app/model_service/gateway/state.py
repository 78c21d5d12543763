"""One call while it is under way: what was asked, how long it waited, how it ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from app.model_service.dialects.base import DialectCodec
from app.model_service.gateway.attempts import AttemptCalls
from app.model_service.gateway.engines import Target
from app.models.model_calls import CallEnd, Dialect, Exchange, ModelSession, Sampled

Headers = list[tuple[bytes, bytes]]


@dataclass(slots=True)
class CallState:
    """Filled in as the call goes on; times are of `time.monotonic`."""

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
    tools: bool = False  # offered
    allowed: bool = False  # counted by its attempt as under way
    turn: bool = False  # and as one that may become a turn
    target: Target | None = None
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
    started: bool = False  # the caller has got a status
    whole: bool = False  # the engine has said all of its stream
    recorded: bool = False
    clock: asyncio.Timeout | None = None  # bounds the time of engines; stands still while the call waits
    silent_since: float | None = None  # since then the engine is to say something; None: it has the word no more
    waited_then_s: float = 0.0

    def left_s(self) -> float:
        """How much longer it may wait."""
        return self.patience_s - sum(self.waited_s.values())

    def listens(self) -> None:
        """From now on the engine has the word."""
        self.silent_since = time.monotonic()
        self.waited_then_s = sum(self.waited_s.values())

    def silent_s(self) -> float:
        """How long the engine has said nothing, without what the call waited for meanwhile."""
        if self.silent_since is None:
            return 0.0
        return time.monotonic() - self.silent_since - (sum(self.waited_s.values()) - self.waited_then_s)

    @contextmanager
    def waiting(self, reason: str) -> Iterator[None]:
        """The block waits, for that reason."""
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

    def exchange(self) -> Exchange:
        """What the record keeps of it."""
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
            built_in=target.ours if target else False,
            scripted=self.scripted,
            sampled=self.sampled,
        )
