"""Decides how an agent ended from its own report and the gateway's record of its model calls. No I/O.

A framework's report about its model is not reliable: some report success after an endpoint that returned garbage, some
call a refused key their own error. The gateway saw every call, so it decides, by two rules that no framework's table of
endings can change:

1. An end that counts as a result needs a model that answered. If the last call ended with a fault of the inference
   server, or the model never answered, the attempt is not scored.
2. An end because the gateway refused more (turns, money, context) is that end, whatever the framework reported.
"""

from __future__ import annotations

from dataclasses import replace

from app.agents.base import AgentReport
from app.models.endings import BLAME, Blame, EndReason
from app.models.model_calls import ENGINE_FAULTS, LASTING_FAULTS, Account, CallEnd

_STOPS = {
    CallEnd.STEP_LIMIT: EndReason.STEP_LIMIT,
    CallEnd.BUDGET_EXHAUSTED: EndReason.BUDGET_EXHAUSTED,
    CallEnd.CONTEXT_EXHAUSTED: EndReason.CONTEXT_EXHAUSTED,
    CallEnd.RUN_BUDGET: EndReason.RUN_BUDGET,
}
_USED_UP = frozenset({CallEnd.STEP_LIMIT, CallEnd.BUDGET_EXHAUSTED})
"""Limits that stay reached. A context may be shortened or a run's budget raised, and the conversation may continue:
those two count only if no call came after them."""

_DECIDED_ELSEWHERE = frozenset(
    {reason for reason, blame in BLAME.items() if blame is not Blame.RESULT} - {EndReason.MODEL_ERROR}
    | {EndReason.RESOURCE_LIMIT}  # by a command of the agent: its own doing, whatever its model did
)
"""Ends that have nothing to do with the model."""

_OPEN_TO_DOUBT = frozenset({EndReason.AGENT_TIMEOUT, EndReason.AGENT_ERROR, EndReason.MODEL_ERROR})
"""Ends that an unreachable gateway can cause, too: a call without an answer takes time, or looks like a fault."""


def reconciled(report: AgentReport, account: Account | None, *, doubt: str = "") -> AgentReport:
    """Returns the report with the end reason and usage that count.

    `account` is the gateway's record of this attempt, flushed. None: the agent has no model or no gateway, and nothing
    changes. `doubt` says why the gateway may have missed, or not counted, some of its calls.
    """
    if account is None:
        return report
    reason, why = _reason(report.end_reason, account, doubt)
    return replace(
        report,
        end_reason=reason,
        detail=report.detail if reason is report.end_reason else _said(why, report),
        steps=account.turns if report.steps is None else report.steps,
        usage=_usage(report.usage, account),
    )


def would_end_the_same(report: AgentReport, account: Account | None) -> bool:
    """Whether another attempt would meet the same fault of its model: a refused key, or an unknown model.

    True only if no call was answered: a key that was accepted before may be accepted again.
    """
    if account is None or report.end_reason is not EndReason.MODEL_ERROR:
        return False
    return account.turns == 0 and (account.turn_end or account.last_end) in LASTING_FAULTS


def _reason(said: EndReason, account: Account, doubt: str) -> tuple[EndReason, str]:
    if said in _DECIDED_ELSEWHERE:
        return said, ""
    counts = BLAME[said] is Blame.RESULT
    last = account.turn_end or account.last_end
    if last in ENGINE_FAULTS:
        why = f"the last turn of its model ended with {last}, and none was answered after it"
        return (EndReason.MODEL_ERROR, why) if counts else (said, "")
    doubted = bool(doubt) and said in _OPEN_TO_DOUBT
    if (stop := _stop(account, last, sure=not doubted)) is not None:
        return (said, "") if _stands(said, stop, account) else (_STOPS[stop], f"the gateway refused a call: {stop}")
    if doubted:
        return EndReason.MODEL_ERROR, doubt
    if counts and account.turns == 0:
        return _unheard(account)
    return said, ""


def _unheard(account: Account) -> tuple[EndReason, str]:
    """Returns the end reason of an attempt that ended without a model answer and without a limit: not scored."""
    if account.calls == 0:
        return EndReason.INFRASTRUCTURE, "it ended without having asked its model anything"
    return EndReason.MODEL_ERROR, f"its model never answered; the newest call ended with {account.last_end}"


def _stop(account: Account, last: CallEnd | None, *, sure: bool) -> CallEnd | None:
    """Returns the limit that ended the attempt's conversation, if any. `sure`: no unseen call came after `last`."""
    if account.stopped_by in _USED_UP:
        return account.stopped_by
    if last is CallEnd.CONTEXT_EXHAUSTED and not sure:
        return None
    return last if last in _STOPS else None


def _stands(said: EndReason, stop: CallEnd, account: Account) -> bool:
    """Whether the framework's end reason overrides the refusal: if both are results. A run without money is none."""
    if stop is CallEnd.RUN_BUDGET:
        return False
    return said is EndReason.AGENT_TIMEOUT or (said is EndReason.SUBMITTED and account.turns > 0)


def _said(why: str, report: AgentReport) -> str:
    own = f"{report.end_reason}: {report.detail}" if report.detail else report.end_reason.value
    return f"{why}; the framework said {own}"


def _usage(reported: dict[str, float], account: Account) -> dict[str, float]:
    """Merges the counts; the gateway's override the framework's. The framework's price is a guess and is named so."""
    merged = dict(reported)
    if (guess := merged.pop("cost_usd", None)) is not None:
        merged["reported_cost_usd"] = guess
    return {**merged, **{name: float(value) for name, value in account.describe().items()}}
