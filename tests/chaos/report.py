"""What the suite leaves: report.json with everything, report.md with the table."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from tests.chaos.case import Case
from tests.chaos.judge import Verdict

COLUMNS = ("tasks", "ok", "lost", "duplicated", "unexpected", "recovered")


def write(verdicts: Sequence[Verdict], cases: Mapping[str, Case], out: Path, shown: Path, took_s: float) -> None:
    """Write both into `out`, and the data at `shown`, where the web server looks."""
    totals = {name: sum(getattr(verdict, name) for verdict in verdicts) for name in COLUMNS}
    data = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"system": platform.system(), "python": platform.python_version()},
        "took_s": round(took_s, 1),
        "totals": totals,
        "cases": [asdict(verdict) | {"about": cases[verdict.case].about} for verdict in verdicts],
    }
    for file in (out / "report.json", shown):
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(".part")
        draft.write_text(json.dumps(data, indent=1) + "\n")
        draft.replace(file)
    (out / "report.md").write_text(_table(verdicts, cases, totals, took_s))


def _table(verdicts: Sequence[Verdict], cases: Mapping[str, Case], totals: Mapping[str, int], took_s: float) -> str:
    bad = [verdict for verdict in verdicts if not verdict.passed]
    head = [
        "# Chaos report",
        "",
        f"{len(verdicts)} cases, {totals['tasks']} tasks, {took_s / 60:.0f} minutes."
        f" Lost {totals['lost']}, duplicated {totals['duplicated']}, unexpected {totals['unexpected']}.",
        "Recovery: from the fault that ended an attempt to the next one in a worker's hands.",
        "",
        "| case | faults | " + " | ".join(COLUMNS) + " | recovery p50 (s) | p99 (s) |",
        "|---|" + "---:|" * (len(COLUMNS) + 3),
    ]
    body = [_row(verdict) for verdict in verdicts]
    told = [f"- **{verdict.case}**: {cases[verdict.case].about}" for verdict in verdicts]
    wrong = [f"- **{verdict.case}**: {note}" for verdict in bad for note in verdict.notes]
    parts = [*head, *body, "", "## What each case breaks", "", *told]
    return "\n".join([*parts, *(["", "## What went wrong", "", *wrong] if wrong else []), ""])


def _row(verdict: Verdict) -> str:
    counts = [str(getattr(verdict, name)) for name in COLUMNS]
    times = ["–" if value is None else f"{value:g}" for value in (verdict.recovery_p50_s, verdict.recovery_p99_s)]
    return "| " + " | ".join([verdict.case, str(verdict.faults), *counts, *times]) + " |"
