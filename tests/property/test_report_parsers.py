"""Parsers of test reports: no text breaks them, and what a runner prints is read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.grading.reports import PARSERS, Report, parse_pytest
from app.models.outcome import TestStatus

FRAGMENTS = st.sampled_from(
    [
        "PASSED ",
        "FAILED ",
        "SKIPPED [1] ",
        " - ",
        " ... ",
        "ok",
        "\n",
        "[",
        "]",
        "::",
        "test_a",
        " F",
        "____ ",
        "\x1b[1m",
    ]
)
NOISE = st.lists(st.one_of(st.text(max_size=20), FRAGMENTS), max_size=60).map("".join)
IDENTIFIER = st.from_regex(r"[a-z_][a-z0-9_]{0,12}", fullmatch=True)
# What pytest lets into an id: printable ASCII; brackets that close, as the separator may stand inside them.
PARAMETER = st.from_regex(r"[a-zA-Z0-9_./:= -]{0,16}[a-zA-Z0-9_]", fullmatch=True)


@st.composite
def pytest_ids(draw: st.DrawFn) -> str:
    name = f"tests/{draw(IDENTIFIER)}.py::test_{draw(IDENTIFIER)}"
    return f"{name}[{draw(PARAMETER)}]" if draw(st.booleans()) else name


STATUSES = st.sampled_from([TestStatus.PASSED, TestStatus.FAILED, TestStatus.ERROR])
WORDS = {TestStatus.PASSED: "PASSED", TestStatus.FAILED: "FAILED", TestStatus.ERROR: "ERROR"}


@pytest.mark.parametrize("name", sorted(PARSERS))
@given(text=NOISE)
def test_no_text_breaks_a_parser(name: str, text: str) -> None:
    statuses = PARSERS[name](text)
    report = Report(statuses)
    assert all(report.status(test) is status for test, status in statuses.items())


@given(
    tests=st.dictionaries(pytest_ids(), STATUSES, max_size=12),
    reason=st.sampled_from(["", " - AssertionError: assert 'a - [b]' == 1", " - ", " - x]"]),
)
def test_a_pytest_summary_is_read_back(tests: dict[str, TestStatus], reason: str) -> None:
    lines = (f"{WORDS[status]} {name}{'' if status is TestStatus.PASSED else reason}" for name, status in tests.items())
    assert parse_pytest("\n".join(["noise", *lines, "= 1 passed ="])) == tests


@given(tests=st.dictionaries(pytest_ids(), STATUSES, max_size=12), percent=st.integers(0, 100))
def test_verbose_pytest_lines_are_read_back(tests: dict[str, TestStatus], percent: int) -> None:
    lines = (f"{name} {WORDS[status]}      [{percent:3d}%]" for name, status in tests.items())
    assert parse_pytest("\r\n".join(lines)) == tests


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "line", ["a::" * 200_000, "a ... " * 200_000, "PASSED " + "[ - " * 200_000, "a.py " * 1600, "x ... " * 1300]
)
@pytest.mark.parametrize("name", sorted(PARSERS))
def test_no_line_keeps_a_parser_busy(name: str, line: str) -> None:
    PARSERS[name]("\n".join([line] * 4))
