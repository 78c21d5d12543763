"""The dashboard's queries name metrics and labels that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PANELS = json.loads((ROOT / "deploy" / "grafana" / "megaflow.json").read_text())["panels"]
SOURCES = "".join(
    (ROOT / "app" / name).read_text() for name in ("control/metrics.py", "model_service/gateway/metrics.py")
)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_query_names_metrics_that_are_served(panel: dict[str, object]) -> None:
    targets = panel["targets"]
    assert isinstance(targets, list)
    for target in targets:
        found = re.findall(r"\bmegaflow_\w+", target["expr"])
        assert found
        for name in found:
            served = re.sub(r"_(bucket|total)$", "", name)
            assert f'"{served}"' in SOURCES, name
        for label in re.findall(
            r"\{\{(\w+)\}\}|(\w+)=\"|by \(([\w, ]+)\)", f"{target['expr']} {target['legendFormat']}"
        ):
            for one in re.split(r"[, ]+", "".join(label)):
                assert one == "le" or f'"{one}"' in SOURCES, one
