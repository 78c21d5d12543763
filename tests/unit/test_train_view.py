"""What `megaflow train` shows while a step goes on."""

from __future__ import annotations

from typing import Any

import pytest

from app.cli import train
from app.ledger.training import StepFigures
from tests.unit.test_training_config import a_config

SO_FAR = StepFigures(8, 0.25, 0.5, attempts=10, used=9, tokens=5_000, seconds=10.0, staleness=1)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_step_under_way_shows_its_figures(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[list[str]] = []
    monkeypatch.setattr(train, "errors", type("Errors", (), {"is_terminal": terminal}))
    view: Any = train._TrainView(a_config(), shown.append, json=False)
    view.progress(2, "rollouts", None, SO_FAR)
    view.progress(2, "training", None)
    assert len(shown[1]) == (2 if terminal else 1), "no figures where none are given"
    if terminal:
        assert shown[0][1].split() == ["2", "+0.250", "50", "%", "1", "10.0", "%", "500", "10", "so", "far"]
    else:
        assert shown[0][1] == "reward +0.250, solved 50 %, stale 1, waste 10.0 %, tokens/s 500"
