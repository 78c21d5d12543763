"""Who may call: turns and money are never exceeded by calls at the same time, and what is by the way costs no turn."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, cast
from uuid import uuid4

import pytest

from app.model_service.dialects import codec_for
from app.model_service.gateway import enforcement
from app.model_service.gateway.state import AttemptCalls, CallState
from app.model_service.recording.recorder import Recorder
from app.model_service.serving import CallRefusal
from app.models.model_calls import Account, CallEnd, Dialect, ModelSession
from app.models.spec import Limits
from tests.building import a_session


@dataclass
class Accounts:
    """An account that a test changes; `gate` holds the answer about the run back."""

    account_: Account = field(default_factory=Account)
    gate: asyncio.Event | None = None
    asked: int = 0

    async def account(self, session: ModelSession) -> Account:
        return self.account_

    async def run_spend(self, session: ModelSession) -> tuple[float, float | None]:
        self.asked += 1
        if self.gate is not None:
            await self.gate.wait()
        return 0.0, None


class Attempt:
    """One attempt and its calls."""

    def __init__(self, patience_s: float = 20.0, **limits: Any) -> None:
        self.calls = AttemptCalls()
        self.accounts = Accounts()
        self._patience_s = patience_s
        self._session = a_session(limits=Limits(**({"max_steps": 1_000_000} | limits)))

    async def allow(self, **body: Any) -> CallState:
        call = CallState(
            id=uuid4(), session=self._session, attempt=self.calls, dialect=Dialect.CHAT, codec=codec_for(Dialect.CHAT),
            headers=[], started_at=datetime.now(UTC), begun=time.monotonic(), patience_s=self._patience_s, body=body,
        )  # fmt: skip
        self.calls.enter()
        try:
            await enforcement.allow(call, cast(Recorder, self.accounts))
        except CallRefusal:
            self.calls.leave(allowed=False, turn=False, tools=call.tools)
            raise
        return call

    def answered(self, call: CallState, cost_usd: float = 0.0) -> None:
        """As the recorder counts it, and the call leaves."""
        old = self.accounts.account_
        if call.tools and not old.offered_tools:
            old = replace(old, turns=0, offered_tools=True)
        is_turn = call.tools or not old.offered_tools
        self.accounts.account_ = replace(
            old, turns=old.turns + is_turn, cost_usd=old.cost_usd + cost_usd, last_cost_usd=cost_usd
        )
        self.left(call)

    def left(self, call: CallState) -> None:
        self.calls.leave(allowed=call.allowed, turn=call.turn, tools=call.tools)


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0)


async def refused(coming: Any) -> CallEnd:
    with pytest.raises(CallRefusal) as caught:
        await coming
    return caught.value.end


async def test_money_is_held_back_for_calls_under_way_whatever_they_are() -> None:
    attempt = Attempt(budget_usd=1.0)
    attempt.accounts.account_ = Account(turns=1, offered_tools=True, cost_usd=0.5, last_cost_usd=0.2)
    calls = [asyncio.create_task(attempt.allow()) for _ in range(50)]  # asides
    await until(lambda: attempt.accounts.asked == 50)
    await asyncio.sleep(0)
    allowed = [call for call in calls if call.done()]
    assert len(allowed) == 3, "$0.5, and three times $0.2"
    for call in allowed:
        attempt.answered(call.result(), cost_usd=0.2)
    ends = [await refused(call) for call in calls if call not in allowed]
    assert set(ends) == {CallEnd.BUDGET_EXHAUSTED}
    assert attempt.accounts.account_.cost_usd < 1.2


async def test_who_waits_for_money_is_let_in_when_it_was_not_spent() -> None:
    attempt = Attempt(budget_usd=1.0)
    attempt.accounts.account_ = Account(turns=1, cost_usd=0.9, last_cost_usd=0.2)
    first = await attempt.allow()
    second = asyncio.create_task(attempt.allow())
    await until(lambda: attempt.accounts.asked == 2)
    assert not second.done()
    attempt.left(first)  # it failed, and cost nothing
    assert (await second).waited_s[enforcement.OWN_CALLS] > 0
