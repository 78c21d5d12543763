"""`megaflow dataset validate` on tasks that are good, flaky, solved already, leaking and open to an attack."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.conftest import System

pytestmark = [pytest.mark.docker, pytest.mark.extra, pytest.mark.timeout(600)]

SOLVE = "#!/bin/sh\nprintf 'the answer to it all is forty-two\\n' >answer\nchmod 644 answer && sync answer\n"
RIGHT = "grep -qs forty-two answer && echo 1 >$OUT || echo 0 >$OUT"
HEAD = "ARG BASE_IMAGE=megaflow/base:bookworm\nFROM ${BASE_IMAGE}\nWORKDIR /app\n"
# The tests are put where the agent worked, beside its own conftest.py.
OPEN = """printf 'def test_it():\\n    assert "forty-two" in open("answer").read()\\n' >test_it.py
python3 -m pytest -q test_it.py && echo 1 >$OUT || echo 0 >$OUT"""
RANDOM = "[ $(($(od -An -N1 -tu1 /dev/urandom) % 2)) = 0 ] && echo 1 >$OUT || echo 0 >$OUT"


def validated(system: System, dataset: Path | str, times: int, code: int = 1) -> dict[str, Any]:
    asked = ("--times", str(times), "--mode", "persistent", "--json")
    done = system.megaflow("dataset", "validate", str(dataset), *asked, timeout_s=500)
    assert done.returncode == code, done.stderr
    return {one["task"]: one for one in json.loads(done.stdout)["tasks"]}


def test_each_task_gets_its_state_and_what_is_quarantined_is_refused_by_name(
    system: System, task_folder: Callable[..., Path]
) -> None:
    folder = task_folder("good", solve=SOLVE, test=RIGHT).parent
    task_folder("solved", solve=SOLVE, test=RIGHT, dockerfile=f"{HEAD}RUN echo forty-two >answer\n")
    task_folder("open", solve=SOLVE, test=OPEN)
    leaking = task_folder("leaking", solve=SOLVE, test=RIGHT, dockerfile=f"{HEAD}COPY solve.sh /opt/solve.sh\n")
    (leaking / "environment" / "solve.sh").write_text(SOLVE)
    found = validated(system, folder, times=2)
    assert {name: one["state"] for name, one in found.items()} == {
        "good": "valid",
        "solved": "quarantined",
        "open": "quarantined",
        "leaking": "quarantined",
    }
    assert found["good"]["rewards"] == {"oracle": [1.0] * 2, "nop": [0.0] * 2, "cheat": [0.0] * 2}
    assert found["good"]["image_id"]
    assert found["solved"]["reason"].startswith("nop 1")
    assert found["open"]["reason"] == "cheat 1"
    assert found["leaking"]["reason"].startswith("the image holds the gold solution: gold: /opt/solve.sh")

    named = ("--agent", "mini-swe-agent", "--model", "replay", "--dry-run")
    refused = system.megaflow("submit", str(folder), *named)
    assert refused.returncode == 65
    assert "solved (nop 1" in refused.stderr
    assert "--include-quarantined" in refused.stderr
    for more in (("--include-quarantined",), ("--task", "good")):
        assert system.megaflow("submit", str(folder), *named, *more).returncode == 0
    assert system.megaflow("submit", str(folder), "--agent", "oracle", "--dry-run").returncode == 0


def test_a_task_that_is_judged_by_chance_is_flaky(system: System, task_folder: Callable[..., Path]) -> None:
    # That no agent's six replicas disagree has a chance of one in thirty thousand.
    folder = task_folder("flaky", solve=SOLVE, test=RANDOM).parent
    found = validated(system, folder, times=6)["flaky"]
    assert found["state"] == "quarantined"
    assert "flaky: " in found["reason"]


def test_all_tasks_of_the_demo_are_valid(system: System) -> None:
    found = validated(system, "demo", times=1, code=0)
    assert len(found) == 12
    assert {name: one["state"] for name, one in found.items()} == dict.fromkeys(found, "valid")
    assert all(one["rewards"] == {"oracle": [1.0], "nop": [0.0], "cheat": [0.0]} for one in found.values())
