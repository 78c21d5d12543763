"""Parses reports that no dataset's library judges into the status of each test. No I/O.

It never fails: text that is no report gives an empty dict. Where a test is named several times the last word counts.
Source: the names follow swebench's log parsers, because the public rows were made with them;
scaleapi/SWE-bench_Pro-os, swe_bench_pro_eval.py (`tests`, `name`, `status`); SWE-Gym/SWE-Bench-Fork at 242429c1,
harness/log_parsers.py (parse_log_pytest_pydantic).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping

from app.models.outcome import TestStatus
from app.models.reports import TESTS_AS_JSON

Parser = Callable[[str], dict[str, TestStatus]]

_STATUSES = {one.name: one for one in (TestStatus.PASSED, TestStatus.FAILED, TestStatus.SKIPPED, TestStatus.ERROR)}
# An expected failure is what the suite wants. An unexpected pass (XPASS) is no status here, as it is none to swebench.
PYTEST_WORDS = _STATUSES | {"XFAIL": TestStatus.PASSED}
_COLOUR = re.compile(r"\[(\d+)m")
_CONTROL = dict.fromkeys(range(1, 32))
_NOTE = re.compile(r"FAILED\s*\[[^\]]*\]")
_LONGEST_LINE = 8192  # characters; a longer one is a test's output, and would keep the patterns busy
_WORDS = "|".join(PYTEST_WORDS)
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_SUMMARY = re.compile(rf"^({_WORDS}) (\S.*)$")
_VERBOSE = re.compile(
    rf"^(\S.*?(?:::|\.py\b|\.txt\b|\.rst\b).*?) ({_WORDS})\b(?: \(.*\))?(?:\s+\[\s*\d+%\]|\s+\d.*)?\s*$"
)
_WORKER = re.compile(rf"^\[gw\d+\](?: \[\s*\d+%\])? ({_WORDS}) (\S.*)$")
_SKIP_COUNT = re.compile(r"^\[\d+\] ")


def parse_pytest(text: str) -> dict[str, TestStatus]:
    """From `-rA` summary lines and from `-v` lines; the summary wins, as it also knows of errors in teardown."""
    verbose: dict[str, TestStatus] = {}
    summary: dict[str, TestStatus] = {}
    for line in plain_lines(text):
        if found := _SUMMARY.match(line):
            if not _SKIP_COUNT.match(found[2]):  # `SKIPPED [2] file:line: reason` names no test
                summary[_without_reason(found[2], found[1])] = PYTEST_WORDS[found[1]]
        elif found := _WORKER.match(line):
            verbose[found[2].strip()] = PYTEST_WORDS[found[1]]
        elif found := _VERBOSE.match(line):
            verbose[found[1].strip()] = PYTEST_WORDS[found[2]]
    return verbose | summary


def _without_reason(named: str, word: str) -> str:
    """`file::test[a - b] - AssertionError: …` without what follows the name.

    A parameter may contain the separator, so a cut is right only where the brackets before it are closed.
    """
    named = named.strip()
    if word == "PASSED":
        return named
    for cut in re.finditer(r" - ", named):
        head = named[: cut.start()]
        if "[" not in head or head.endswith("]"):
            return head
    # An expected failure without a reason has a bare separator at its end in some versions.
    return named.removesuffix(" -")


def parse_tests_as_json(text: str) -> dict[str, TestStatus]:
    """From the JSON below the last mark: what the dataset's own parser found. Empty when there is none, or no JSON."""
    report = text.rpartition(f"\n{TESTS_AS_JSON}\n")[2] if TESTS_AS_JSON in text else ""
    try:
        found, _ = json.JSONDecoder().raw_decode(report.lstrip())
    except (ValueError, RecursionError):
        return {}
    tests = found.get("tests") if isinstance(found, dict) else None
    statuses: dict[str, TestStatus] = {}
    for test in tests if isinstance(tests, list) else []:
        if isinstance(test, dict) and isinstance(name := test.get("name"), str):
            statuses[name] = _STATUSES.get(str(test.get("status")), TestStatus.FAILED)
    return statuses


def parse_pydantic(text: str) -> dict[str, TestStatus]:
    """From lines of pytest that begin or end with a status; a failed test's progress in brackets is passed over."""
    statuses: dict[str, TestStatus] = {}
    for line in text.split("\n"):
        if len(line) > _LONGEST_LINE:
            continue
        words = _NOTE.sub("FAILED", _COLOUR.sub("", line).translate(_CONTROL)).split()
        if len(words) < 2:
            continue
        for word, status in PYTEST_WORDS.items():
            if words[0].startswith(word):
                statuses[words[1]] = PYTEST_WORDS.get(words[0], status)
                break
        else:
            if words[1] in PYTEST_WORDS and words[-1] == words[1]:
                statuses[words[0]] = PYTEST_WORDS[words[1]]
    return statuses


PARSERS: Mapping[str, Parser] = {
    "pytest": parse_pytest,
    "swe-bench-pro": parse_tests_as_json,
    "swe-bench-live": parse_tests_as_json,
    "swe-gym-pydantic": parse_pydantic,
}


_OPENING = re.compile(r"^=+ test session starts =+$")
_CLOSING = re.compile(r"^=* ?(?:(?:no tests \w+|\d+ [a-z][a-z ]*)(?:[,(].*)? in|Results \() ?[\d.]+ ?s(?:econds)?\b.*$")
_FAILING = frozenset({TestStatus.FAILED, TestStatus.ERROR})
_FAILED_COUNT = re.compile(r"\b(\d+) failed\b")
_PYTEST = re.compile(r"^(?!.*(?:[|>]|install|no:terminal|-qq)).*\bpytest\b", re.MULTILINE)
"""A line of a command that runs it, with its report on standard output."""
_UNITTEST = re.compile(r"^(?:FAIL|ERROR): (\S.*)$")


def contradiction(
    text: str, statuses: Mapping[str, TestStatus], command: str, without_xfail: Collection[str] = ()
) -> str:
    """Why pytest or unittest did not write the report as it is, in words; empty: it may have.

    statuses: of the tests that count. without_xfail: tests of which no line expects a failure. Each session of pytest
    has a closing line (so has pytest-pretty's), names no test after it, and lists those that failed after those that
    passed. One that is killed may not have written its opening. unittest names each failure once more at its end: in
    the heading, or by the description below it.
    """
    opened = closed = named = -1
    told = told_within = listed = depth = 0
    is_heading = False
    failed: set[str] = set()
    counted = {name for name, status in statuses.items() if status not in _FAILING}
    for number, line in enumerate(plain_lines(text)):
        heading = _UNITTEST.match(line)
        failing = heading[1] if heading else line
        if (heading or is_heading) and failing in counted:
            return f"its report has {failing} as passed, and then as failed"
        is_heading = heading is not None
        if _OPENING.match(line):
            opened, depth = number, depth + 1
        elif _CLOSING.match(line):
            closed, depth = number, max(0, depth - 1)
            count = sum(map(int, _FAILED_COUNT.findall(line)))
            told, told_within = told + count * (not depth), told_within + count * bool(depth)  # what a test ran itself
        elif found := _SUMMARY.match(line):
            name, status = _without_reason(found[2], found[1]), PYTEST_WORDS[found[1]]
            named = number if name in counted else named
            listed += status in _FAILING
            if found[1] == "XFAIL" and name in without_xfail:
                return f"its report has {name} as an expected failure, which the hidden tests do not say"
            if status is TestStatus.PASSED and name in counted and failed & {name, name.partition("::")[0]}:
                return f"its report has {name} as failed, and then as passed"
            if status in _FAILING:
                failed.add(name)
        elif (found := _VERBOSE.match(line)) and found[1].strip() in counted:
            named = number
    told += told_within if depth else 0  # sessions that have no end are no frame
    if listed < told and "-rA" in command:
        return f"pytest counts {told} failed tests and its report lists {listed}"
    if opened > closed or (closed < 0 and _PYTEST.search(command)):
        return "pytest began and its report has no end"
    return "its report names tests after pytest's end" if -1 < closed < named else ""


def ended_early(text: str, command: str) -> str:
    """That pytest was to run, and wrote no closing line, in words; empty: it may have come to its end."""
    closed = any(_CLOSING.match(line) for line in plain_lines(text))
    return "" if closed or not _PYTEST.search(command) else "pytest wrote no closing line: it ended early"


class Report:
    """What a parser found, asked by the names that rows use.

    Older rows cut a pytest name at its first space, and carry in a parameter an absolute path of the machine that made
    the row. Of several tests that such a name fits the last one counts.
    """

    def __init__(self, statuses: Mapping[str, TestStatus]) -> None:
        self._exact = statuses
        self._moved = {_moved(name): status for name, status in statuses.items()}
        self._cut = {name.split()[0]: status for name, status in self._moved.items() if name.split()}

    def status(self, expected: str) -> TestStatus:
        """MISSING when no test of that name was reported."""
        if expected in self._exact:
            return self._exact[expected]
        moved = _moved(expected)
        if moved in self._moved:
            return self._moved[moved]
        was_cut = "::" in expected and "[" in expected and not expected.endswith("]")
        return self._cut.get(moved, TestStatus.MISSING) if was_cut else TestStatus.MISSING


_PATH_PARAMETER = re.compile(r"^([^\[]*::[^\[]*)\[(/[^/*].*)\]$")


def _moved(name: str) -> str:
    """The name with an absolute path in its parameter shortened to the last segment."""
    found = _PATH_PARAMETER.match(name)
    return f"{found[1]}[/{found[2].rsplit('/', 1)[-1]}]" if found else name


def plain_lines(text: str) -> Iterator[str]:
    """A report's lines without colours, of those too long for one the beginning."""
    for line in _COLOURS.sub("", text).split("\n"):
        yield line[:_LONGEST_LINE].strip()
