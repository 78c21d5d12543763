"""What becomes of a group, and which rules a run may have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import SpecInvalid
from app.ledger.replicas import GroupDecision, GroupFacts, Why, decide
from app.models.groups import Adaptive, GroupRules, first_replicas

FACTS = GroupFacts(
    base=4, most=0, quorum=None, drop_equal=False, stored=0, equal=True, going=0, live=0, stopped=0, lost=0, repairs=0,
    hedges=0,
)  # fmt: skip
READY, WAIT, LOST = GroupDecision("ready"), GroupDecision(), GroupDecision("lost")


def of(**changes: Any) -> GroupDecision:
    return decide(replace(FACTS, **changes))


@pytest.mark.parametrize(
    ("facts", "decision"),
    [
        ({"stored": 4}, READY),
        ({"stored": 3, "going": 1}, WAIT),
        ({"stored": 3}, READY),  # one brought nothing that can be had again
        ({"stored": 3, "going": 1, "quorum": 3}, READY),
        ({"stored": 2, "going": 1, "quorum": 9}, WAIT),
        ({"stored": 4, "quorum": 9}, READY),
        ({"stored": 3, "lost": 1}, GroupDecision(add=1)),
        ({"stored": 1, "going": 2, "lost": 1}, GroupDecision(add=1)),
        ({"stored": 1, "going": 2, "lost": 1, "quorum": 3}, WAIT),  # enough are under way
        ({"stored": 3, "lost": 1, "repairs": 1}, READY),
        ({"lost": 4}, GroupDecision(add=4)),
        ({"lost": 8, "repairs": 4}, LOST),
        ({"stored": 1, "lost": 8, "repairs": 4}, READY),
        ({}, LOST),
        ({"stored": 2, "lost": 1, "stopped": 1}, READY),  # cancelled: nothing is added
        ({"stored": 4, "drop_equal": True}, GroupDecision("equal")),
        ({"stored": 4, "drop_equal": True, "equal": False}, READY),
        ({"stored": 1, "drop_equal": True}, READY),
        ({"stored": 4, "most": 16}, READY),
        ({"stored": 4, "most": 16, "drop_equal": True}, GroupDecision("equal")),
        ({"stored": 4, "most": 16, "equal": False}, GroupDecision(add=12, why=Why.ADAPTIVE)),
        ({"stored": 3, "going": 1, "most": 16, "equal": False}, WAIT),
        ({"stored": 14, "base": 16, "most": 16, "quorum": 14, "equal": False, "going": 2}, READY),
    ],
)
def test_a_group_becomes(facts: dict[str, Any], decision: GroupDecision) -> None:
    assert of(**facts) == decision


COUNT = st.integers(0, 20)


@given(st.builds(GroupFacts, st.integers(1, 16), COUNT, st.none() | st.integers(1, 20), st.booleans(), COUNT,
                 st.booleans(), COUNT, COUNT, COUNT, COUNT, COUNT, COUNT))  # fmt: skip
def test_no_group_waits_for_nothing_and_none_grows_without_end(facts: GroupFacts) -> None:
    decision = decide(facts)
    if decision == WAIT:
        assert facts.going, "what waits has something to wait for"
    if decision.state:
        assert (decision.state == "lost") == (facts.stored == 0)
    if decision.add:
        assert not facts.stopped
        if decision.why is Why.REPAIR:
            assert facts.repairs + decision.add <= min(facts.lost, facts.base)
        else:
            assert facts.base + decision.add == facts.most


@pytest.mark.parametrize(
    ("replicas", "rules", "purpose", "said"),
    [
        (16, {"quorum": 14}, "evaluation", "purpose 'training' alone"),
        (16, {"quorum": 17}, "training", "from 1 to 16"),
        (16, {"quorum": 0}, "training", "from 1 to 16"),
        (4, {"quorum": 4, "most": 16}, "training", "from 5 to 16"),
        (1, {"most": 4}, "training", "at least 2"),
        (4, {"most": 4}, "training", "from 4 to 4"),
        (4, {"hedge_after": "95"}, "training", "such as 'p95'"),
        (4, {"hedge_after": "p100"}, "training", "such as 'p95'"),
    ],
)
def test_rules_that_cannot_be_are_refused(replicas: int, rules: dict[str, Any], purpose: str, said: str) -> None:
    with pytest.raises(SpecInvalid, match=said):
        GroupRules(**rules).check(replicas, purpose)


def test_rules_of_a_submission() -> None:
    rules = GroupRules.of(Adaptive(4, 16), 14, "p95")
    rules.check(first_replicas(Adaptive(4, 16)), "training")
    assert (rules.percent, rules.most, rules.quorum) == (95, 16, 14)
    GroupRules.of(16, None, None).check(16, "evaluation")
