"""Results as tables of pandas, and as a notebook shows them."""

from __future__ import annotations

from app.client import MegaFlow
from tests.integration.test_reports import NIGHT, Reports, reports

__all__ = ["reports"]


def test_a_run_is_a_table_in_which_what_was_not_scored_has_no_reward(reports: Reports) -> None:
    with MegaFlow(reports.settings) as flow:
        frame = flow.run(reports.run("night", NIGHT)).to_pandas()
    assert list(frame["name"]) == list(NIGHT)
    assert frame["reward"].mean() == 0.5
    assert list(frame["scored"]) == [True] * 4 + [False]
    assert (frame["agent_s"] >= 0).all()
    assert frame.set_index("name").loc["click-4", "suspect"] == "conftest-hook"
