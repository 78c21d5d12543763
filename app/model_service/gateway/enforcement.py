"""Enforces an attempt's limits on turns, money and context before an engine is called."""

from __future__ import annotations

import asyncio
import time

from app.errors import DatabaseUnavailable
from app.model_service.gateway.state import CallState
from app.model_service.recording.recorder import Recorder
from app.model_service.serving import CallRefusal
from app.models.model_calls import Account, CallEnd, ModelSession

_AGAIN_S = 0.5
OWN_CALLS = "turns"
"""Wait reason of a call that waits for other calls of its attempt."""


def refuse_other_models(session: ModelSession, model: str) -> None:
    """Refuses models other than the task's model and its side models. Raises: CallRefusal."""
    if model != session.model.name and model not in session.model.side_models:
        allowed = ", ".join(map(repr, (session.model.name, *session.model.side_models)))
        raise CallRefusal(
            403,
            "model_not_allowed",
            f"this attempt may call {allowed}, found {model!r:.200}; another model is allowed at submission by"
            " `--side-model NAME`",
        )


async def allow(call: CallState, recorder: Recorder) -> None:
    """Waits until the call may be made; it then counts as under way. Raises: CallRefusal.

    Calls that might use the last allowed turn, or the last of the budget, wait for earlier ones: no call is refused
    because of a turn that then fails, and none exceeds the limit.
    """
    call.tools = bool(call.body.get("tools"))
    limits = call.session.limits
    while True:
        spent, bound = await recorder.run_spend(call.session)
        account = await _account(call, recorder)
        # No await from here to where the call is counted: another call could use the same turn.
        if limits.context_tokens is not None:
            fits(call, limits.context_tokens)
        if limits.budget_usd is not None and account.cost_usd >= limits.budget_usd:
            raise _over_budget("this attempt", account.cost_usd, limits.budget_usd, CallEnd.BUDGET_EXHAUSTED)
        if bound is not None and spent >= bound:
            raise _over_budget("the run", spent, bound, CallEnd.RUN_BUDGET)
        turn = call.tools or not (account.offered_tools or call.attempt.tool_turns)
        if not (turn and _waits_for_turns(call, account)) and not _waits_for_money(call, account):
            break
        with call.waiting(OWN_CALLS):
            await _until_one_ends(call)
    call.turn = turn
    call.allowed = True
    call.attained_s = account.model_s
    call.attempt.allow(turn=turn, tools=call.tools)


def _waits_for_turns(call: CallState, account: Account) -> bool:
    """Whether the call must wait for turns under way. Raises: CallRefusal: there are none left.

    Calls that offer tools are turns; if an agent never offers any, all its calls are. Other calls are auxiliary, such
    as titles. Calls before the first one with tools are auxiliary too, and do not count against `max_steps`.
    """
    most = call.session.limits.max_steps
    had = 0 if call.tools and not account.offered_tools else account.turns
    if had >= most:
        raise CallRefusal(
            400, "step_limit_exceeded", f"this attempt has used up its {most} turns; it ends here", CallEnd.STEP_LIMIT
        )
    return had + call.attempt.tool_turns + (0 if call.tools else call.attempt.turns) >= most


def _waits_for_money(call: CallState, account: Account) -> bool:
    """Whether calls under way may spend the rest of the budget, if each costs as much as the last call."""
    budget, under_way = call.session.limits.budget_usd, call.attempt.under_way
    if budget is None or not under_way or not account.last_cost_usd:
        return False
    return account.cost_usd + under_way * account.last_cost_usd >= budget


async def _until_one_ends(call: CallState) -> None:
    try:
        await call.attempt.one_end(max(0.01, call.left_s()))
    except TimeoutError:
        raise CallRefusal(
            429, "turns_under_way", "the last calls of this attempt are still under way", CallEnd.THROTTLED
        ) from None


async def _account(call: CallState, recorder: Recorder) -> Account:
    while True:
        try:
            return await recorder.account(call.session)
        except DatabaseUnavailable as error:
            if call.left_s() <= 0:
                raise CallRefusal(503, "ledger_unavailable", str(error), CallEnd.THROTTLED, final=False) from error
        with call.waiting("ledger"):
            await asyncio.sleep(min(_AGAIN_S, max(0.01, call.left_s())))


def fits(call: CallState, window: int) -> None:
    """Refuses a conversation only if the engine has already counted its beginning as too long; no engine is called.

    Raises: CallRefusal.
    """
    attempt = call.attempt
    if attempt.prompt_tokens <= window or len(call.raw) < attempt.prompt_bytes:
        return
    raise CallRefusal(
        400,
        "context_length_exceeded",
        f"the conversation has {attempt.prompt_tokens} tokens or more, and may have {window}",
        CallEnd.CONTEXT_EXHAUSTED,
    )


def _over_budget(whose: str, spent: float, bound: float, end: CallEnd) -> CallRefusal:
    return CallRefusal(
        400, "budget_exhausted", f"{whose} has spent ${spent:.4f} of ${bound:.4f} on model calls; it ends here", end
    )


def estimate(call: CallState) -> int:
    """Estimates the call's tokens for rate limits. The actual count corrects it later."""
    attempt = call.attempt
    if attempt.prompt_bytes:
        return max(1, attempt.prompt_tokens * len(call.raw) // attempt.prompt_bytes)
    return max(1, len(call.raw) // 4)


def learn(call: CallState, prompt_tokens: int | None) -> None:
    """Keeps the engine's token count for the next call of this attempt."""
    if prompt_tokens and call.end is CallEnd.ANSWERED and call.turn:
        call.attempt.prompt_tokens = prompt_tokens
        call.attempt.prompt_bytes = len(call.raw)
        call.attempt.used_at = time.monotonic()
