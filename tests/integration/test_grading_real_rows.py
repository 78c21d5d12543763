"""Twelve rows of SWE-bench: scripts, parsers and verdicts are those of swebench 4.1.0, test by test.

The logs are made in the words of each repository's test runner, with every named test in a status that is known.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from app.agents.installation import indexes, once
from app.datasets.base import Reading
from app.datasets.source import open_dataset
from app.grading.judges import judge
from app.grading.resident_libraries import GradingLibraries
from app.models.outcome import TestStatus
from app.models.spec import AgentTask, TestsGoal
from tests.integration import test_grading_libraries
from tests.unit.row_reading import goal_of

FILE = Path(__file__).parent / "grading" / "swebench_rows.jsonl"
ROWS: dict[str, dict[str, Any]] = {row["instance_id"]: row for row in map(json.loads, FILE.read_text().splitlines())}
libraries = test_grading_libraries.libraries
KINDS = ("gold", "nothing", "wrong", "breaking", "broken off", "skipping")
# What a runner prints of a test.
_PYTEST = {
    "PASSED": "PASSED {}",
    "FAILED": "FAILED {} - assert 1 == 2",
    "ERROR": "ERROR {} - x",
    "SKIPPED": "SKIPPED {}",
}
_DJANGO = {"PASSED": "{} ... ok", "FAILED": "{} ... FAIL", "ERROR": "{} ... ERROR", "SKIPPED": "{} ... skipped 'x'"}
_SYMPY = {"PASSED": "{} ok", "FAILED": "{} F", "ERROR": "{} E", "SKIPPED": "{} s"}
_WORDS: Mapping[str, Mapping[str, str]] = {"django/django": _DJANGO, "sympy/sympy": _SYMPY}

# swebench itself, with all its packages; only what makes its environment is left out, as that asks GitHub.
REFERENCE = """
import json, sys, tempfile
from swebench.harness.grading import get_eval_report
from swebench.harness.test_spec import test_spec

test_spec.make_env_script_list = lambda *_: []
found = {}
for name, asked in json.load(sys.stdin).items():
    spec = test_spec.make_test_spec(asked["row"], namespace="swebench")
    reports = {}
    for kind, log in asked["logs"].items():
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(f">>>>> Applied Patch\\n>>>>> Start Test Output\\n{log}\\n>>>>> End Test Output\\n")
            file.flush()
            prediction = {"instance_id": name, "model_name_or_path": "m", "model_patch": "p"}
            reports[kind] = get_eval_report(spec, prediction, file.name, include_tests_status=True)[name]
    found[name] = {"script": spec.eval_script_list, "reports": reports}
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def tasks(libraries: GradingLibraries) -> dict[str, AgentTask]:
    reading = Reading(pack=lambda _: pytest.fail("there is no folder"), describe=libraries.describe)
    found = {task.name: task for task in open_dataset(str(FILE), reading).tasks()}
    assert len(found) == 12
    return found


def statuses_of(goal: TestsGoal, kind: str) -> dict[str, str]:
    """What each named test came to; absent: it was not printed."""
    fixed, others = list(goal.fail_to_pass), list(goal.pass_to_pass)
    found = dict.fromkeys((*others, *fixed), "PASSED")
    match kind:
        case "nothing":
            found |= dict.fromkeys(fixed, "FAILED")
        case "wrong":
            found[fixed[0]] = "ERROR"
        case "breaking":
            found[others[0]] = "FAILED"
        case "broken off":
            found = dict(list(found.items())[: len(others) // 2])
        case "skipping":
            found[fixed[-1]] = "SKIPPED"
    return found


def log_of(row: Mapping[str, Any], statuses: Mapping[str, str]) -> str:
    words = _WORDS.get(row["repo"], _PYTEST)
    return "\n".join(["collected", *(words[status].format(name) for name, status in statuses.items()), "done"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ROWS)
def test_each_test_of_a_row_is_read_from_its_runners_log(
    libraries: GradingLibraries, tasks: dict[str, AgentTask], name: str, kind: str
) -> None:
    goal = goal_of(tasks[name])
    wrote = statuses_of(goal, kind)
    found = judge(goal, log_of(ROWS[name], wrote), 1, libraries)
    silent = {"SKIPPED"} if ROWS[name]["repo"] == "sympy/sympy" else set()  # its parser reads no skipped test
    # swebench cuts a path in a name, and the row has it whole: such a test is missing whatever the log says.
    never = {test for test in goal.pass_to_pass if "[/n/" in test}
    wrote = {test: status for test, status in wrote.items() if test not in never}
    assert {test: status.name for test, status in found.statuses.items()} == {
        test: "MISSING" if wrote.get(test, "MISSING") in silent else wrote.get(test, "MISSING")
        for test in (*goal.fail_to_pass, *goal.pass_to_pass)
    }
    if never:
        assert not found.resolved
    elif kind != "skipping":
        assert found.resolved is (kind == "gold")


@pytest.mark.extra
@pytest.mark.timeout(900)
def test_scripts_and_verdicts_are_swebenchs_own_test_by_test(
    libraries: GradingLibraries, tasks: dict[str, AgentTask], tmp_path: Path
) -> None:
    python, uv = str(tmp_path / "swebench" / "bin" / "python"), once.uv("swebench")
    env = indexes.environment()
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, tmp_path / "swebench"], check=True, env=env)
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, "swebench==4.1.0"], check=True, env=env)
    logs = {
        name: {kind: log_of(ROWS[name], statuses_of(goal_of(task), kind)) for kind in KINDS}
        for name, task in tasks.items()
    }
    asked = {name: {"row": ROWS[name], "logs": logs[name]} for name in ROWS}
    done = subprocess.run(
        [python, "-c", REFERENCE], input=json.dumps(asked), capture_output=True, text=True, check=True
    )
    recorded = {
        one["row"]["instance_id"]: [line.replace("{test_patch}", one["row"]["test_patch"]) for line in one["script"]]
        for one in json.loads((FILE.parent / "described.json").read_text())
    }
    for name, theirs in json.loads(done.stdout).items():
        assert recorded[name] == theirs["script"]  # what test_grading_libraries compares our commands with
        for kind, report in theirs["reports"].items():
            ours = judge(goal_of(tasks[name]), logs[name][kind], 1, libraries)
            assert ours.resolved is report["resolved"], (name, kind)
            for lists in report["tests_status"].values():
                assert all(ours.statuses[test] is TestStatus.PASSED for test in lists["success"]), (name, kind)
                assert all(ours.statuses[test] is not TestStatus.PASSED for test in lists["failure"]), (name, kind)
