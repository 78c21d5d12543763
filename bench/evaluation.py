"""How fast datasets are read and test logs are judged.

python -m bench.evaluation     (writes results/evaluation.json)

Rows and logs are made here. Each judge gets the same logs of pytest, by as many processes as the machine has
processors; the figure is the median of five rounds. A kept report is judged again from its bytes, as a regrade does.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from app.agents.installation import Installer
from app.datasets.base import Reading
from app.datasets.source import open_dataset
from app.grading.resident_libraries import GradingLibraries
from app.grading.test_run import TestRun, read_report
from app.grading.tests_goal import TestsGrader
from app.models.spec import Bundle, JudgeName, TestsGoal
from app.settings import load
from bench.record import Row, machine, row, write

ROWS, LOGS, REPORTS, ROUNDS = 50_000, 200, 1_000, 5
NAMES = tuple(f"tests/test_all.py::test_{number}" for number in range(200))
LOG = "\n".join(["= test session starts =", *(f"PASSED {name}" for name in NAMES), "= 200 passed in 1.00s ="])


def loading() -> list[Row]:
    """50,000 rows of SWE-bench's size, read and checked one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        with path.open("w") as file:
            for number in range(ROWS):
                file.write(json.dumps(a_row(number)) + "\n")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begun = time.perf_counter()
        dataset = open_dataset(str(path), Reading(pack=lambda folder: Bundle(sha256="0" * 64, size_bytes=0)))
        count = len(list(dataset.entries()))
        took = time.perf_counter() - begun
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert count == ROWS
    return [
        row("50,000 rows read and checked", took, "s", goal=5.0, better="less"),
        row("memory for 50,000 rows", grown, "MiB", goal=64.0, better="less"),
    ]


def a_row(number: int) -> dict[str, object]:
    return {
        "instance_id": f"owner__repo-{number}", "repo": "owner/repo", "base_commit": "a" * 40, "version": "1.0",
        "image_name": "example.org/owner:1", "test_cmd": "pytest -rA", "log_parser": "pytest",
        "problem_statement": "words " * 200, "patch": "+ line\n" * 100, "test_patch": "+ line\n" * 100,
        "FAIL_TO_PASS": list(NAMES[:5]), "PASS_TO_PASS": list(NAMES[5:50]), "created_at": "2024-01-01",
    }  # fmt: skip


def goals() -> dict[str, TestsGoal]:
    """By judge, what reads the same log."""
    common = {"base_commit": "HEAD", "test_command": "pytest -rA", "fail_to_pass": NAMES[:5], "pass_to_pass": NAMES[5:]}
    old = {"repo": "pallets/flask", "version": "2.3", "instance_id": "pallets__flask-1"}
    new = {"eval_type": "pass_and_fail", "instance_id": "x"}
    return {
        "own": TestsGoal(**common),
        "swebench 4": TestsGoal(**common, judge=JudgeName.SWEBENCH_4, log_parser="pallets/flask", row=old),
        "swebench 5": TestsGoal(**common, judge=JudgeName.SWEBENCH_5, log_parser="parse_log_pytest", row=new),
    }


def judging(libraries: GradingLibraries) -> list[Row]:
    """Logs of 200 tests a second, and a thousand kept reports judged again."""
    found = []
    workers = os.cpu_count() or 1
    for name, goal in goals().items():
        grader = TestsGrader(goal, libraries)
        run = read_report(a_report())
        assert grader.verdict(run, limit_s=60.0).reward == 1.0, name
        rate = per_second(lambda grader=grader, run=run: grader.verdict(run, limit_s=60.0), LOGS, workers)
        found.append(row(f"{name}: logs judged", rate, "per s", goal=200.0))
    grader = TestsGrader(goals()["own"], libraries)
    report = a_report()
    rate = per_second(lambda: grader.verdict(read_report(report), limit_s=60.0), REPORTS, workers, rounds=1)
    return [*found, row("1,000 kept reports judged again", REPORTS / rate, "s", goal=10.0, better="less")]


def per_second(work: Callable[[], object], count: int, workers: int, *, rounds: int = ROUNDS) -> float:
    """Median over the rounds of how many were done in a second."""
    rates = []
    with ThreadPoolExecutor(workers) as pool:
        for _ in range(rounds):
            begun = time.perf_counter()
            list(pool.map(lambda _: work(), range(count)))
            rates.append(count / (time.perf_counter() - begun))
    return statistics.median(rates)


def a_report() -> bytes:
    """As `TestRun.report` keeps it."""
    output = f">>>>> MegaFlow n start\n{LOG}\n\n>>>>> MegaFlow n end 0\n".encode()
    return TestRun(nonce="n", output=output, exit_code=0).report()


def main() -> int:
    """Measure, print, write."""
    settings = load()
    libraries = GradingLibraries(Installer(settings.tools).install_library, most_processes=os.cpu_count() or 1)
    with closing(libraries):
        rows = [*loading(), *judging(libraries)]
    for one in rows:
        print(f"{one.metric:34} {one.value:8.4g} {one.unit:6} goal {one.goal:g}: {'yes' if one.holds else 'NO'}")
    print(write("evaluation", [machine({}), *rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
