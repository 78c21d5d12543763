"""Parses reports that only one dataset has into the status of each test. No I/O; they never fail.

Source: scaleapi/SWE-bench_Pro-os, swe_bench_pro_eval.py (`tests`, `name`, `status`); SWE-Gym/SWE-Bench-Fork at
242429c1, harness/log_parsers.py (parse_log_pytest_pydantic).
"""

from __future__ import annotations

import json
import re

from app.models.outcome import TestStatus
from app.models.reports import TESTS_AS_JSON

_WORDS = {
    "PASSED": TestStatus.PASSED,
    "FAILED": TestStatus.FAILED,
    "SKIPPED": TestStatus.SKIPPED,
    "ERROR": TestStatus.ERROR,
}
# An expected failure is what the suite wants. An unexpected pass (XPASS) is no status here, as it is none to swebench.
PYTEST_WORDS = _WORDS | {"XFAIL": TestStatus.PASSED}
_COLOUR = re.compile(r"\[(\d+)m")
_CONTROL = dict.fromkeys(range(1, 32))
_NOTE = re.compile(r"FAILED\s*\[[^\]]*\]")
LONGEST_LINE = 8192  # characters; a longer one is a test's output, and would keep the patterns busy


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
            statuses[name] = _WORDS.get(str(test.get("status")), TestStatus.FAILED)
    return statuses


def parse_pydantic(text: str) -> dict[str, TestStatus]:
    """From lines of pytest that begin or end with a status; a failed test's progress in brackets is passed over."""
    statuses: dict[str, TestStatus] = {}
    for line in text.split("\n"):
        if len(line) > LONGEST_LINE:
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
