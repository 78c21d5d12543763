"""Parses reports that no dataset's library judges into the status of each test. No I/O.

It never fails: text that is no report gives an empty dict. If a test is named several times, the last status counts.
Source: the names follow swebench's log parsers, because the public rows were made with them; scaleapi/SWE-bench_Pro-os,
swe_bench_pro_eval.py (`tests`, `name`, `status`); SWE-Gym/SWE-Bench-Fork at 242429c1, harness/log_parsers.py
(parse_log_pytest_pydantic).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping

from app.models.outcome import TestStatus
from app.models.reports import TESTS_AS_JSON

Parser = Callable[[str], dict[str, TestStatus]]

_STATUSES = {one.name: one for one in (TestStatus.PASSED, TestStatus.FAILED, TestStatus.SKIPPED, TestStatus.ERROR)}
# An expected failure counts as passed. An unexpected pass (XPASS) has no status here, as in swebench.
PYTEST_WORDS = _STATUSES | {"XFAIL": TestStatus.PASSED}
_COLOUR = re.compile(r"\[(\d+)m")
_CONTROL = dict.fromkeys(range(1, 32))
_NOTE = re.compile(r"FAILED\s*\[[^\]]*\]")
_LONGEST_LINE = 8192  # characters; a longer one is a test's output, and slow to match
_WORDS = "|".join(PYTEST_WORDS)
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_SUMMARY = re.compile(rf"^({_WORDS}) (\S.*)$")
_VERBOSE = re.compile(
    rf"^(\S.*?(?:::|\.py\b|\.txt\b|\.rst\b).*?) ({_WORDS})\b(?: \(.*\))?(?:\s+\[\s*\d+%\]|\s+\d.*)?\s*$"
)
_WORKER = re.compile(rf"^\[gw\d+\](?: \[\s*\d+%\])? ({_WORDS}) (\S.*)$")
_SKIP_COUNT = re.compile(r"^\[\d+\] ")


def parse_pytest(text: str) -> dict[str, TestStatus]:
    """Reads `-rA` summary lines and `-v` lines; the summary overrides, as it also has errors in teardown."""
    verbose: dict[str, TestStatus] = {}
    summary: dict[str, TestStatus] = {}
    for line in plain_lines(text):
        if match := _SUMMARY.match(line):
            if not _SKIP_COUNT.match(match[2]):  # `SKIPPED [2] file:line: reason` names no test
                summary[_without_reason(match[2], match[1])] = PYTEST_WORDS[match[1]]
        elif match := _WORKER.match(line):
            verbose[match[2].strip()] = PYTEST_WORDS[match[1]]
        elif match := _VERBOSE.match(line):
            verbose[match[1].strip()] = PYTEST_WORDS[match[2]]
    return verbose | summary


def _without_reason(named: str, word: str) -> str:
    """Returns `file::test[a - b] - AssertionError: …` without the text after the name.

    A parameter may contain the separator, so a cut is right only if the brackets before it are closed.
    """
    named = named.strip()
    if word == "PASSED":
        return named
    for cut in re.finditer(r" - ", named):
        head = named[: cut.start()]
        if "[" not in head or head.endswith("]"):
            return head
    # Some versions leave a bare separator after an expected failure without a reason.
    return named.removesuffix(" -")


def parse_tests_as_json(text: str) -> dict[str, TestStatus]:
    """Reads the JSON below the last mark, written by the dataset's own parser. Empty when there is none, or no JSON."""
    report = text.rpartition(f"\n{TESTS_AS_JSON}\n")[2] if TESTS_AS_JSON in text else ""
    try:
        value, _ = json.JSONDecoder().raw_decode(report.lstrip())
    except (ValueError, RecursionError):
        return {}
    tests = value.get("tests") if isinstance(value, dict) else None
    statuses: dict[str, TestStatus] = {}
    for test in tests if isinstance(tests, list) else []:
        if isinstance(test, dict) and isinstance(name := test.get("name"), str):
            statuses[name] = _STATUSES.get(str(test.get("status")), TestStatus.FAILED)
    return statuses


def parse_pydantic(text: str) -> dict[str, TestStatus]:
    """Reads lines of pytest that begin or end with a status; a failed test's progress in brackets is skipped."""
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
"""Line of a command that runs it, with its report on standard output."""
_UNITTEST = re.compile(r"^(?:FAIL|ERROR): (\S.*)$")


def contradiction(
    text: str, statuses: Mapping[str, TestStatus], command: str, without_xfail: Collection[str] = ()
) -> str:
    """Returns why pytest or unittest cannot have written this report, in words; empty: it may have.

    statuses: of the tests that count. without_xfail: tests without a line that expects a failure. Each session of
    pytest has a closing line (also with pytest-pretty), names no test after it, and lists failed tests after passed
    ones. A killed session may lack its opening. unittest names each failure again at its end: in the heading, or by the
    description below it.
    """
    opened = closed = named = -1
    total = nested = listed = depth = 0
    is_heading = False
    failed_names: set[str] = set()
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
            total, nested = (
                total + count * (not depth),
                nested + count * bool(depth),
            )  # nested: in sessions that a test started
        elif match := _SUMMARY.match(line):
            name, status = _without_reason(match[2], match[1]), PYTEST_WORDS[match[1]]
            named = number if name in counted else named
            listed += status in _FAILING
            if match[1] == "XFAIL" and name in without_xfail:
                return f"its report has {name} as an expected failure, which the hidden tests do not say"
            if status is TestStatus.PASSED and name in counted and failed_names & {name, name.partition("::")[0]}:
                return f"its report has {name} as failed, and then as passed"
            if status in _FAILING:
                failed_names.add(name)
        elif (match := _VERBOSE.match(line)) and match[1].strip() in counted:
            named = number
    total += nested if depth else 0  # without an end, an outer session does not count
    if listed < total and "-rA" in command:
        return f"pytest counts {total} failed tests and its report lists {listed}"
    if opened > closed or (closed < 0 and _PYTEST.search(command)):
        return "pytest began and its report has no end"
    return "its report names tests after pytest's end" if -1 < closed < named else ""


def ended_early(text: str, command: str) -> str:
    """Returns the message that pytest should run but wrote no closing line; empty: it may have finished."""
    closed = any(_CLOSING.match(line) for line in plain_lines(text))
    return "" if closed or not _PYTEST.search(command) else "pytest wrote no closing line: it ended early"


class Report:
    """Test statuses from a parser, looked up by the names that rows use.

    Older rows cut a pytest name at its first space, and have in a parameter an absolute path of the machine that made
    the row. If several tests match such a name, the last one counts.
    """

    def __init__(self, statuses: Mapping[str, TestStatus]) -> None:
        self._exact = statuses
        self._moved = {_moved(name): status for name, status in statuses.items()}
        self._cut = {name.split()[0]: status for name, status in self._moved.items() if name.split()}

    def status(self, expected: str) -> TestStatus:
        """Returns MISSING when no test of that name was reported."""
        if expected in self._exact:
            return self._exact[expected]
        moved = _moved(expected)
        if moved in self._moved:
            return self._moved[moved]
        was_cut = "::" in expected and "[" in expected and not expected.endswith("]")
        return self._cut.get(moved, TestStatus.MISSING) if was_cut else TestStatus.MISSING


_PATH_PARAMETER = re.compile(r"^([^\[]*::[^\[]*)\[(/[^/*].*)\]$")


def _moved(name: str) -> str:
    """Returns the name with an absolute path in its parameter shortened to the last segment."""
    match = _PATH_PARAMETER.match(name)
    return f"{match[1]}[/{match[2].rsplit('/', 1)[-1]}]" if match else name


def plain_lines(text: str) -> Iterator[str]:
    """Yields a report's lines without colours; of lines that are too long, the beginning."""
    for line in _COLOURS.sub("", text).split("\n"):
        yield line[:_LONGEST_LINE].strip()
