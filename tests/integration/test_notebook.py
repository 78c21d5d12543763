"""Results as tables of pandas, and as a notebook shows them."""

from __future__ import annotations

from app.client import MegaFlow
from app.models.outcome import Verdict
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


def test_a_notebook_shows_a_run_and_runs_nothing_of_it(reports: Reports) -> None:
    hostile = "<script>alert(1)</script>"
    run_id = reports.run(hostile, {"click-1": Verdict(reward=0.0, counts=True, detail=hostile)})
    with MegaFlow(reports.settings) as flow:
        run = flow.run(run_id)
        shown = run._repr_html_() + run.handles[0]._repr_html_()
    assert "<script>" not in shown
    assert f"/runs/{run_id}" in shown
