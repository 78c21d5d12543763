"""Groups the failures of a run by signature, so that each cause is read once. No I/O."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from app.grading.base import BROKE_GRADING
from app.ledger.report_rows import ReportRow
from app.models.spec import Wire

_VOLATILE = (
    (re.compile(r"\b[0-9a-f]{12,64}\b"), "ID"),
    (re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22,}\b"), "ID"),
    (re.compile(r"0x[0-9a-f]+"), "ADDRESS"),
    (re.compile(r"\d+(?:\.\d+)?"), "N"),
)
_JUDGED = (
    (re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`"), "TEXT"),
    (re.compile(r"[\w.@+~-]*(?:/[\w.@+~-]+)+/?|[\w.@+~-]*\w\.[A-Za-z]\w{0,7}\b"), "PATH"),
)
"""Further texts that differ between verdicts of one kind."""
_SUSPECT = "suspect"
_MOST_EXAMPLES = 3
_MOST_SHOWN = 600
"""Characters of a message: the reason stands at the end of many."""


class FailureGroup(Wire):
    """Tasks with one cause of failure: not scored, or not solved for another reason than their own tests."""

    count: int
    end_reason: str
    error: str
    phase: str
    line: str  # first line of the first task's message, or its rule; the others differ in ids, numbers and the like
    hosts: dict[str, int]
    images: dict[str, int]
    examples: tuple[str, ...]  # tasks, for `megaflow show`


def diagnose(rows: Sequence[ReportRow]) -> list[FailureGroup]:
    """Groups failures of infrastructure, submissions that broke grading, and suspect verdicts; largest group first."""
    groups: dict[tuple[str, str, str, str], list[ReportRow]] = defaultdict(list)
    for row in rows:
        if row.failure or _judged(row):
            groups[_signature(row)].append(row)
    return sorted((_group(key, members) for key, members in groups.items()), key=lambda one: -one.count)


def _judged(row: ReportRow) -> str:
    """Returns why a verdict rests on more than the tests; empty: it does not."""
    if row.verdict.get("suspect"):
        return _SUSPECT
    return BROKE_GRADING if str(row.verdict.get("detail", "")).startswith(BROKE_GRADING) else ""


def _signature(row: ReportRow) -> tuple[str, str, str, str]:
    first = _first_line(_message(row))
    if not row.failure:
        first = first.partition(": " if row.verdict.get("suspect") else "; found")[0]
    for pattern, word in _VOLATILE if row.failure else (*_JUDGED, *_VOLATILE):
        first = pattern.sub(word, first)
    error = str(row.failure.get("error", "")) if row.failure else _judged(row)
    return row.end_reason or row.state, error, str(row.failure.get("phase") or "graded"), first[:160]


def _message(row: ReportRow) -> str:
    if row.failure:
        return str(row.failure.get("message", ""))
    return str(row.verdict.get("suspect") or row.verdict.get("detail", ""))


def _first_line(message: str) -> str:
    return next((line.strip() for line in message.splitlines() if line.strip()), "")


def _group(key: tuple[str, str, str, str], rows: Sequence[ReportRow]) -> FailureGroup:
    hosts: dict[str, int] = defaultdict(int)
    images: dict[str, int] = defaultdict(int)
    for row in rows:
        hosts[row.host or "unknown"] += 1
        images[str(row.environment.get("image") or row.spec["task"]["environment"].get("image") or "built")] += 1
    end_reason, error, phase, _ = key
    return FailureGroup(
        count=len(rows),
        end_reason=end_reason,
        error=error,
        phase=phase,
        line=_first_line(_message(rows[0]))[:_MOST_SHOWN],
        hosts=dict(sorted(hosts.items(), key=lambda item: -item[1])[:5]),
        images=dict(sorted(images.items(), key=lambda item: -item[1])[:5]),
        examples=tuple(str(row.task_id) for row in rows[:_MOST_EXAMPLES]),
    )
