"""How fast datasets are read and test logs are judged.

python -m bench.evaluation     (writes results/evaluation.json)

Rows and logs are made here. Each judge gets logs of the same 200 tests of pytest, by as many processes as the machine
has processors; the figure is the median of five rounds. A regrade is of a run whose attempts are in a PostgreSQL and
an artifact store of its own, and every verdict changes.
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
from uuid import UUID

from app.agents.installation import Installer
from app.artifacts import ArtifactStore, open_store
from app.datasets.base import Reading
from app.datasets.source import open_dataset
from app.evaluation.regrade import regrade
from app.grading.resident_libraries import GradingLibraries
from app.grading.suite_run import TestRun, read_report
from app.grading.tests_goal import TestsGrader
from app.ledger import accept, admission, attempts, ends, instances
from app.ledger.accept import NewRun
from app.ledger.database import Database
from app.ledger.instances import InstanceDemand
from app.models.endings import EndReason
from app.models.outcome import Artifact, ArtifactKind, TestStatus, Verdict
from app.models.spec import AgentTask, Bundle, EnvironmentSpec, JudgeName, Mode, TaskSpec, TestsGoal
from app.settings import load
from app.stack.private import private_stack
from bench.record import Row, machine, row, write

ROWS, LOGS, ATTEMPTS, ROUNDS = 50_000, 200, 1_000, 5
NAMES = tuple(f"tests/test_all.py::test_{number}" for number in range(200))
FRAME = "= test session starts =\n{}\n= 200 passed in 1.00s ="
LOG = FRAME.format("\n".join(f"PASSED {name}" for name in NAMES))
VERBOSE = FRAME.format("\n".join(f"{name} PASSED [ 50%]" for name in NAMES))
GO = "\n".join(f"--- PASS: {name} (0.00s)" for name in NAMES)
WRONG = Verdict(reward=0.0, counts=True, tests=dict.fromkeys(NAMES, TestStatus.FAILED), grader="a grader of before")


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


def goals() -> dict[str, tuple[TestsGoal, str]]:
    """By judge, a goal and the log that it reads."""
    common = {"base_commit": "HEAD", "test_command": "pytest -rA", "fail_to_pass": NAMES[:5], "pass_to_pass": NAMES[5:]}
    old = {"repo": "pallets/flask", "version": "2.3", "instance_id": "pallets__flask-1"}
    new = {"eval_type": "pass_and_fail", "instance_id": "x"}
    smith = {"instance_id": "mewwts__addict.75284f95.x__1", "repo": "swesmith/mewwts__addict.75284f95"}
    before = {"failed_tests": NAMES[:5], "passed_tests": NAMES[5:], "skipped_tests": []}
    multi = {
        "org": "cli", "repo": "cli", "number": 7, "run_result": {**before, "failed_tests": []},
        "test_patch_result": before, "f2p_tests": dict.fromkeys(NAMES[:5]), "p2p_tests": dict.fromkeys(NAMES[5:]),
    }  # fmt: skip
    go = {**common, "test_command": "go test -v ./..."}
    fifth = {**common, "judge": JudgeName.SWEBENCH_5, "row": new}
    return {
        "own": (TestsGoal(**common), LOG),
        "swebench 4": (TestsGoal(**common, judge=JudgeName.SWEBENCH_4, log_parser="pallets/flask", row=old), LOG),
        "swebench 5": (TestsGoal(**fifth, log_parser="parse_log_pytest"), LOG),
        "swebench 5, pytest_v2": (TestsGoal(**fifth, log_parser="parse_log_pytest_v2"), LOG),
        "multi-swe-bench": (TestsGoal(**go, judge=JudgeName.MULTI_SWE_BENCH, row=multi), GO),
        "swesmith": (TestsGoal(**common, judge=JudgeName.SWESMITH, row=smith), VERBOSE),
    }


def judging(libraries: GradingLibraries) -> list[Row]:
    """Logs of 200 tests a second."""
    found = []
    workers = os.cpu_count() or 1
    for name, (goal, text) in goals().items():
        grader = TestsGrader(goal, libraries)
        run = read_report(a_report(text))
        assert grader.verdict(run, limit_s=60.0).reward == 1.0, name
        rate = per_second(lambda grader=grader, run=run: grader.verdict(run, limit_s=60.0), LOGS, workers)
        found.append(row(f"{name}: logs judged", rate, "per s", goal=200.0))
    return found


def regrading(libraries: GradingLibraries) -> list[Row]:
    """A thousand attempts with their reports in a store, judged again; then once more, when nothing changes."""
    found = []
    with private_stack(control_workers=0) as stack, closing(Database(stack.settings.database())) as database:
        store = open_store(stack.settings.artifacts())
        for name in ("own", "swebench 4"):
            goal, text = goals()[name]
            run_id = stored_run(database, store, goal, a_report(text))
            begun = time.perf_counter()
            summary = regrade(database, store, libraries, run_id)
            took = time.perf_counter() - begun
            assert (summary.judged, summary.solved_now) == (ATTEMPTS, ATTEMPTS), summary.left_out
            assert regrade(database, store, libraries, run_id).stored == 0
            found.append(row(f"{name}: 1,000 attempts regraded", took, "s", goal=10.0, better="less"))
    return found


def stored_run(database: Database, store: ArtifactStore, goal: TestsGoal, report: bytes) -> UUID:
    """A run whose tasks have ended with a wrong verdict and a right report."""
    environment = EnvironmentSpec(image="i")
    tasks = [AgentTask(name=f"t-{n}", description="d", environment=environment, goal=goal) for n in range(ATTEMPTS)]
    specs = [TaskSpec(task=task, agent="nop", mode=Mode.PERSISTENT) for task in tasks]
    made = accept.accept(database, NewRun(specs=specs, name="regraded"))
    with database.begin() as connection:
        (instance_id,) = instances.request(
            connection, InstanceDemand("process", Mode.PERSISTENT, "standard", 4, 1, None)
        )
        messages = admission.admit(connection, [(task_id, Mode.PERSISTENT) for task_id in made.task_ids])
    assert instances.ready(database, instance_id)
    for message in messages:
        claim = attempts.claim(database, message.message, instance_id, lease_s=60)
        assert claim is not None
        key = f"runs/{claim.run_id}/{claim.attempt_id}/report"
        kept = Artifact(kind=ArtifactKind.TEST_REPORT, key=key, url=store.put(key, report), size_bytes=len(report))
        ends.finish(database, claim, end_reason=EndReason.SUBMITTED, verdict=WRONG, artifacts=[kept])
    return made.run_id


def per_second(work: Callable[[], object], count: int, workers: int) -> float:
    """Median over the rounds of how many were done in a second."""
    rates = []
    with ThreadPoolExecutor(workers) as pool:
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            list(pool.map(lambda _: work(), range(count)))
            rates.append(count / (time.perf_counter() - begun))
    return statistics.median(rates)


def a_report(text: str) -> bytes:
    """As `TestRun.report` keeps it."""
    output = f">>>>> MegaFlow n start\n{text}\n\n>>>>> MegaFlow n end 0\n".encode()
    return TestRun(nonce="n", output=output, exit_code=0, rule="").report()


def main() -> int:
    """Measure, print, write."""
    settings = load()
    libraries = GradingLibraries(Installer(settings.tools).install_library, most_processes=os.cpu_count() or 1)
    with closing(libraries):
        rows = [*loading(), *judging(libraries), *regrading(libraries)]
    for one in rows:
        print(f"{one.metric:34} {one.value:8.4g} {one.unit:6} goal {one.goal:g}: {'yes' if one.holds else 'NO'}")
    print(write("evaluation", [machine({}), *rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
