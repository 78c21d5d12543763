"""Promise 7 at the agents' door: whatever a framework says, no fault of an engine's counts, and no result is lost."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from app.agents.base import AgentReport
from app.agents.reconcile import reconciled
from app.models.endings import BLAME, Blame, EndReason
from app.models.model_calls import ENGINE_FAULTS, Account, CallEnd

STOPS = (CallEnd.STEP_LIMIT, CallEnd.BUDGET_EXHAUSTED, CallEnd.CONTEXT_EXHAUSTED, CallEnd.RUN_BUDGET)
TURN_ENDS = [end for end in CallEnd if end is not CallEnd.CLIENT_GONE]


def accounts() -> list[Account]:
    """Every account that a gateway could give, as far as it matters here."""
    found = [Account()]
    for last, turn, stop, turns in product(CallEnd, [None, *TURN_ENDS], [None, *STOPS], (0, 3)):
        if (turn is CallEnd.ANSWERED and turns == 0) or (stop is None and (turn in STOPS or last in STOPS)):
            continue
        found.append(Account(calls=turns + 1, turns=turns, last_end=last, turn_end=turn, stopped_by=stop))
    return found


ALL = [(AgentReport(reason, "as the framework says"), account) for reason in EndReason for account in accounts()]


def counts(reason: EndReason) -> bool:
    return BLAME[reason] is Blame.RESULT


def test_no_fault_of_an_engine_is_counted() -> None:
    for report, account in ALL:
        if account.turn_end in ENGINE_FAULTS and report.end_reason is not EndReason.RESOURCE_LIMIT:
            assert not counts(reconciled(report, account).end_reason), (report, account)


def test_what_counts_rests_on_a_model_that_was_heard_or_on_a_bound_that_was_met() -> None:
    for report, account in ALL:
        end = reconciled(report, account).end_reason
        if counts(end) and end is not EndReason.RESOURCE_LIMIT:
            assert account.turns > 0 or account.stopped_by is not None, (report, account)


def test_no_result_is_thrown_away() -> None:
    """The model was heard, its last word was none of the engine's faults, and nobody took its money away."""
    for report, account in ALL:
        last = account.turn_end or account.last_end
        heard = account.turns > 0 and last not in ENGINE_FAULTS and last is not CallEnd.RUN_BUDGET
        if counts(report.end_reason) and heard:
            assert counts(reconciled(report, account).end_reason), (report, account)


def test_what_was_not_measured_becomes_a_result_only_by_a_bound() -> None:
    for report, account in ALL:
        end = reconciled(report, account).end_reason
        if not counts(report.end_reason) and counts(end):
            assert report.end_reason is EndReason.MODEL_ERROR, (report, account)
            assert end in (EndReason.STEP_LIMIT, EndReason.BUDGET_EXHAUSTED, EndReason.CONTEXT_EXHAUSTED)
            assert account.stopped_by is not None


def test_a_bound_that_was_met_is_the_end_whatever_the_framework_makes_of_the_refusal() -> None:
    for said in (EndReason.MODEL_ERROR, EndReason.AGENT_ERROR, EndReason.STEP_LIMIT):
        for stop in STOPS:
            account = Account(calls=4, turns=3, last_end=stop, turn_end=stop, stopped_by=stop)
            assert reconciled(AgentReport(said), account).end_reason.value == stop.value


def test_a_persons_decision_stays() -> None:
    for report, account in ALL:
        if BLAME[report.end_reason] in (Blame.PERSON, Blame.INTERRUPTION):
            assert reconciled(report, account).end_reason is report.end_reason


def test_a_run_without_money_is_nobodys_result() -> None:
    for report, account in ALL:
        if account.turn_end is CallEnd.RUN_BUDGET and account.stopped_by is CallEnd.RUN_BUDGET:
            end = reconciled(report, account).end_reason
            assert not counts(end) or end is EndReason.RESOURCE_LIMIT, (report, account)


def test_bringing_together_twice_changes_nothing_more() -> None:
    for report, account in ALL:
        once = reconciled(report, account)
        assert reconciled(once, account).end_reason is once.end_reason, (report, account)


IN_DOUBT = "the gateway was away"


def test_time_and_errors_are_charged_to_an_agent_only_by_a_gateway_that_saw_every_call() -> None:
    for report, account in ALL:
        end = reconciled(report, account, doubt=IN_DOUBT).end_reason
        if report.end_reason in (EndReason.AGENT_TIMEOUT, EndReason.AGENT_ERROR) and counts(end):
            # Used up: no call after that would have been answered, whoever was there to hear it.
            heard = {account.stopped_by, account.turn_end or account.last_end}
            assert heard & {CallEnd.STEP_LIMIT, CallEnd.BUDGET_EXHAUSTED}, (report, account)


def test_a_doubt_takes_away_no_other_result_and_makes_none() -> None:
    for report, account in ALL:
        sure, unsure = reconciled(report, account), reconciled(report, account, doubt=IN_DOUBT)
        if report.end_reason not in (EndReason.AGENT_TIMEOUT, EndReason.AGENT_ERROR, EndReason.MODEL_ERROR):
            assert unsure == sure, (report, account)
        assert unsure.end_reason in (sure.end_reason, EndReason.MODEL_ERROR), (report, account)
        assert reconciled(unsure, account, doubt=IN_DOUBT).end_reason is unsure.end_reason, (report, account)


def test_a_doubt_is_told() -> None:
    heard = Account(calls=3, turns=3, last_end=CallEnd.ANSWERED, turn_end=CallEnd.ANSWERED)
    found = reconciled(AgentReport(EndReason.AGENT_TIMEOUT, "still working"), heard, doubt=IN_DOUBT)
    assert found.end_reason is EndReason.MODEL_ERROR
    assert IN_DOUBT in found.detail
    assert "agent_timeout: still working" in found.detail


def test_another_reason_says_why_and_what_the_framework_said() -> None:
    for report, account in ALL:
        changed = reconciled(report, account)
        if changed.end_reason is not report.end_reason:
            assert "as the framework says" in changed.detail
            assert report.end_reason.value in changed.detail


def test_without_an_account_nothing_changes() -> None:
    for reason in EndReason:
        report = AgentReport(reason, "x", log=Path("log"), usage={"cost_usd": 1.0})
        assert reconciled(report, None) is report


@given(
    reported=st.dictionaries(
        st.sampled_from(["prompt_tokens", "cost_usd", "own"]), st.floats(0, 1e6, allow_nan=False), max_size=3
    ),
    calls=st.integers(1, 50),
    unpriced=st.integers(0, 50),
    prompt=st.integers(0, 10**9),
    cost=st.floats(0, 1e4, allow_nan=False),
)
def test_the_gateways_counts_go_before_and_a_price_that_only_the_framework_knows_is_a_guess(
    reported: dict[str, float], calls: int, unpriced: int, prompt: int, cost: float
) -> None:
    unpriced = min(unpriced, calls)
    account = Account(
        calls=calls,
        turns=1,
        prompt_tokens=prompt,
        cost_usd=cost,
        unpriced_calls=unpriced,
        last_end=CallEnd.ANSWERED,
        turn_end=CallEnd.ANSWERED,
    )
    merged = reconciled(AgentReport(EndReason.SUBMITTED, usage=dict(reported)), account)
    assert merged.usage["prompt_tokens"] == prompt
    assert merged.usage.get("own") == reported.get("own")
    assert merged.usage.get("reported_cost_usd") == reported.get("cost_usd")
    assert merged.usage.get("cost_usd") == account.describe().get("cost_usd")
    assert merged.steps == 1
