"""The lines that tell a score: its marks, its interval, on eighty columns."""

from __future__ import annotations

import io
import uuid
from datetime import UTC, datetime
from typing import Any

import pytest

from app.cli import report as command
from app.cli.show import reward
from app.cli.tables import SafeConsole
from app.evaluation.report import report_of
from app.ledger.results import RunStatus
from app.models.outcome import TaskResult, Verdict
from app.models.spec import Mode
from app.models.states import TaskState
from app.texts import solved, summary
from tests.unit.test_report import HEAD, lost, row


def status(**changes: Any) -> RunStatus:
    values: dict[str, Any] = {
        "id": uuid.uuid4(),
        "name": "night",
        "user_name": "a",
        "purpose": "evaluation",
        "total": 5,
        "created_at": datetime.now(UTC),
        "states": {"succeeded": 4, "failed": 1},
        "scored": 4,
        "resolved": 2,
        "mean_reward": 0.5,
        "scripted": 0,
        "scripted_resolved": 0,
        "suspect": 0,
        "superseded": 0,
        "finished_at": None,
    }
    return RunStatus(**{**values, **changes})


@pytest.mark.parametrize(
    ("verdict", "scripted", "said"),
    [
        (None, False, "-"),
        (Verdict(reward=None, counts=False), False, "-"),
        (Verdict(reward=0.5, counts=True), False, "0.5"),
        (Verdict(reward=1.0, counts=True), True, "1 scripted"),
        (Verdict(reward=1.0, counts=True).suspected("hook"), False, "0 suspect"),
        (Verdict(reward=1.0, counts=True).suspected("hook"), True, "0 suspect scripted"),
    ],
)
def test_a_reward_has_its_marks(verdict: Verdict | None, scripted: bool, said: str) -> None:
    result = TaskResult(
        task_id=uuid.uuid4(),
        run_id=uuid.uuid4(),
        name="t",
        agent="a",
        mode=Mode.PERSISTENT,
        state=TaskState.SUCCEEDED,
        verdict=verdict,
        scripted=scripted,
    )
    assert reward(result) == said


def test_a_summary_has_the_interval_the_suspects_and_the_loss() -> None:
    said = summary(status(suspect=1), " (95 %: 15 to 85 %)")
    assert said == (
        "night: 2 of 4 scored solved (95 %: 15 to 85 %), mean reward 0.500, 1 suspect counted as 0; 1 of 5 not scored"
    )
    outside = summary(status(mean_reward=30.176, rewards_outside=2))
    assert outside.startswith("night: 2 of 4 scored solved, mean reward 30.176 (2 of 4 rewards outside 0..1);")
    assert solved(status(suspect=1)) == "2/4 (1 suspect)"
    assert "suspect" not in summary(status())
    assert solved(status()) == "2/4"


def test_a_report_fits_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    out = SafeConsole(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(command, "console", out)
    rows = [row(f"some-organisation__a-long-name-{n % 12}-{n}", float(n % 3 == 0)) for n in range(200)]
    suspect = row("s", 0.0, verdict={"reward": 0.0, "counts": True, "suspect": "rule"})
    command._print_report(report_of(HEAD, [*rows, suspect, lost("x"), row("o", agent="oracle")]))
    said = out.file.getvalue()  # type: ignore[attr-defined]
    tables = said[said.index("agents") : said.index("note:")]
    assert all(len(line) <= 80 for line in tables.splitlines())
    assert "67 solved of 201 scored, of 202 tasks" in said
    assert "not scored: 1 environment_error (ImageUnavailable)" in said
    assert "oracle" in said
    assert "and 3 more (`| cat` shows all)" in said, "of the thirteen repositories"
