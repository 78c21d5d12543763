"""What `megaflow explain` prints, piece by piece; and the spread of a run's phases."""

from __future__ import annotations

from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from app.cli.explain import bar, shares_table
from app.ledger.explain_run import spread
from app.ledger.stories import Share


def test_bars_are_in_proportion_and_nothing_is_hidden() -> None:
    assert [len(bar(value, 100)) for value in (100, 50, 1, 0.001, 0, -1)] == [30, 15, 1, 1, 0, 0]
    assert bar(0, 0) == ""


def test_a_table_without_a_whole_shows_no_parts_of_it() -> None:
    def printed(whole_s: float | None) -> str:
        page = Console(width=80, file=StringIO())
        with page.capture() as caught:
            page.print(shares_table("title", [Share("[b]line", 30.0)], whole_s))
        return caught.get()

    assert "50 %" in printed(60)
    assert "%" not in printed(None)
    assert "%" not in printed(0)
    assert "[b]line" in printed(60)  # a name is never markup


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40))
def test_a_spread_is_made_of_values_that_occurred(values: list[float]) -> None:
    found = spread("agent", values)
    assert {found.p50_s, found.p90_s, found.max_s} <= set(values)
    assert found.p50_s <= found.p90_s <= found.max_s == max(values)
    assert sum(value <= found.p50_s for value in values) >= len(values) / 2
    assert sum(value <= found.p90_s for value in values) >= 0.9 * len(values)
    assert (found.count, found.total_s) == (len(values), pytest.approx(sum(values)))


def test_the_middle_of_two_is_the_lower_one() -> None:
    assert spread("agent", [2.0, 1.0]).p50_s == 1.0
