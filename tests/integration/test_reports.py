"""`megaflow report`, `compare`, `diagnose`, `export` and marks of suspect verdicts, over a real ledger and store."""

from __future__ import annotations

import csv
import hashlib
import json
import re
import time
from html import unescape
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from uuid import UUID

import pyarrow.parquet as pq
import pytest
from sqlalchemy import text

from app.artifacts import open_store
from app.artifacts.base import ArtifactStore
from app.control.transcripts import TranscriptChecks
from app.errors import (
    ArtifactMissing,
    ExportRefused,
    OptionInvalid,
    ReportRefused,
    UnknownName,
)
from app.evaluation import transcripts
from app.ledger import accept, attempts, ends, names, results
from app.ledger.accept import NewRun
from app.ledger.attempts import Claim
from app.ledger.database import Database
from app.models.endings import EndReason, RetryPolicy
from app.models.outcome import Artifact, ArtifactKind, AttemptRecord, Failure, Phase, TestStatus, Verdict
from app.models.shell import CommandResult
from app.models.spec import AgentTask, EnvironmentSpec, JudgeName, Mode, ModelChoice, TaskSpec, TestsGoal
from app.scheduling.auditor import Auditor
from app.settings import Settings
from app.workers.terminal import Terminal
from tests.building import dispatched, ready_instance
from tests.integration.command import CommandLine
from tests.waiting import eventually, in_background

PATCH = b"--- a/x\n+++ b/x\n"
SUSPECT = Verdict(reward=0.0, counts=True, suspect="conftest-hook", claimed_reward=1.0, grader="swebench 4.1.0")


MET = {
    "resources": {"cpus": 2.0, "memory_bytes": 2 << 30, "kill_at": {"cpus": 6.0, "memory_bytes": 6 << 30}},
    "memory": {"limit_bytes": 6 << 30, "killed": {"agent": 2, "grading": 0}, "killed_by_host": {"agent": 1}},
    "cpu": {"limit": 6.0, "throttled_s": {"agent": 7.5, "grading": 0.0}},
}
"""Limits that every attempt of these runs has met."""


class Reports:
    """The commands on the settings of a test, and runs that end as a test says."""

    def __init__(self, settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        self.command = CommandLine(settings, monkeypatch)
        self.json = self.command.json
        self.settings, self.database = settings, database
        self.test_reports: dict[str, bytes] = {}
        """By the name of a task what is kept of its tests; of others it is a line."""
        self.also: dict[ArtifactKind, bytes] = {}
        """What else every attempt leaves."""
        self.store: ArtifactStore = open_store(settings.artifacts())

    def __call__(self, *arguments: object) -> str:
        return self.command(*arguments)

    def run(self, name: str, outcomes: dict[str, Verdict | Failure], *, replicas: int = 1, version: str = "2") -> UUID:
        """A run of mini-swe-agent whose tasks end with these verdicts and failures."""
        model = ModelChoice(name="big-one", api_key_env="A_KEY")
        specs = [
            TaskSpec(task=_task(one), agent="mini-swe-agent", model=model, mode=Mode.PERSISTENT) for one in outcomes
        ]
        made = accept.accept(self.database, NewRun(specs=specs, replicas=replicas, name=name))
        instance = ready_instance(self.database)
        for item in dispatched(self.database, made, Mode.PERSISTENT):
            claim = attempts.claim(self.database, item.message, instance, lease_s=30)
            assert claim is not None
            self._end(claim, outcomes[claim.spec.task.name], version)
        return made.run_id

    def attempt(self, run_id: UUID, name: str = "click-1") -> AttemptRecord:
        """The one attempt of a task."""
        task_id = names.find(self.database, "tasks", f"{run_id}/{name}")
        (found,) = results.results(self.database, [task_id])[0].attempts
        return found

    def keep(self, run_id: UUID, kind: str, content: bytes) -> str:
        """Have the attempt of `click-1` have this; its page."""
        attempt = self.attempt(run_id)
        self.store.put(f"runs/{run_id}/{attempt.id}/{kind}", content)
        return f"/attempts/{attempt.id}"

    def _end(self, claim: Claim, outcome: Verdict | Failure, version: str) -> None:
        environment = {"agent_version": version, "image_id": "sha256:a", **MET}
        attempts.record_phase(self.database, claim, Phase.AGENT_STARTED, environment=environment)
        attempts.record_phase(self.database, claim, Phase.AGENT_ENDED)
        if isinstance(outcome, Failure):
            reason = EndReason.ENVIRONMENT_ERROR
            values = {"end_reason": reason, "failure": outcome, "artifacts": [], "permanent": True}
            ends.fail(self.database, claim, retry=RetryPolicy(1, 10), **values)  # type: ignore[arg-type]
            return
        command = "git log --all" if outcome.suspect else "ls"
        step = {"step_id": 2, "source": "agent", "message": f"```bash\n{command}\n```"}
        pieces = {
            ArtifactKind.PATCH: PATCH,
            ArtifactKind.TRAJECTORY: json.dumps({"steps": [step]}).encode(),
            ArtifactKind.TERMINAL: recording(command),
            ArtifactKind.TEST_REPORT: self.test_reports.get(claim.spec.task.name, b"1 passed"),
            **self.also,
        }
        artifacts = [self._stored(claim, kind, content) for kind, content in pieces.items()]
        ends.finish(self.database, claim, end_reason=EndReason.SUBMITTED, verdict=outcome, artifacts=artifacts)

    def _stored(self, claim: Claim, kind: ArtifactKind, content: bytes) -> Artifact:
        key = f"runs/{claim.run_id}/{claim.attempt_id}/{kind}"
        digest = hashlib.sha256(content).hexdigest()
        return Artifact(kind=kind, key=key, url=self.store.put(key, content), size_bytes=len(content), sha256=digest)


def recording(*commands: str) -> bytes:
    """Of an agent that ran these, a tenth of a second each and apart."""
    terminal, begun = Terminal(), time.monotonic()
    for number, command in enumerate(commands):
        noted = terminal.begin("agent", command)
        result = CommandResult(0, b"\x1b[32mdone\x1b[0m\n", b"", timed_out=False, truncated=False, duration_s=0.1)
        noted.finish(result)
        noted.begun, noted.ended = begun + number, begun + number + 0.1
        noted._pieces = [(noted.ended, piece) for _, piece in noted._pieces]
    return terminal.pack([])


def _task(name: str) -> AgentTask:
    """Of SWE-bench's kind; `multi-N` of Multi-SWE-bench."""
    row: dict[str, Any] = {"instance_id": name, "repo": "pallets/click", "language": "python"}
    judge = JudgeName.OWN
    if name.startswith("multi-"):
        row, judge = {"org": "cli", "repo": "cli", "number": int(name[6:])}, JudgeName.MULTI_SWE_BENCH
    return AgentTask(
        name=name,
        description="d",
        environment=EnvironmentSpec(image="i"),
        goal=TestsGoal(
            base_commit="c" * 40,
            test_command="t",
            fail_to_pass=("a",),
            pass_to_pass=(),
            judge=judge,
            row=row,
        ),
    )


def verdict(reward: float) -> Verdict:
    return Verdict(reward=reward, counts=True, tests={"a": TestStatus.PASSED}, grader="swebench 4.1.0")


LOST = Failure(error="ImageUnavailable", message="=no image 17", phase=Phase.CLAIMED)
NIGHT: dict[str, Verdict | Failure] = {
    "click-1": verdict(1.0),
    "click-2": verdict(1.0),
    "click-3": verdict(0.0),
    "click-4": SUSPECT,
    "click-5": LOST,
}


@pytest.fixture
def reports(settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch) -> Reports:
    return Reports(settings, database, monkeypatch)


# --- Reports --------------------------------------------------------------------------------------------------------


def test_a_report_is_refused_after_much_loss_and_told_when_asked(reports: Reports, tmp_path: Path) -> None:
    reports.run("night", NIGHT)
    with pytest.raises(ReportRefused, match=r"lost 1 of 5 tasks.*ImageUnavailable.*--allow-loss"):
        reports("report", "latest")
    said = reports("report", "latest", "--allow-loss")
    assert "night: 50.0 % (95 %: 15.0 to 85.0 %, Wilson)" in said
    assert "2 solved of 4 scored, of 5 tasks" in said
    assert "not scored: 1 environment_error (ImageUnavailable)" in said
    assert "limits met: 10 processes killed for memory, throttled 38s" in said
    assert "resources: 2 cpus, 2048 MiB guaranteed; kill at 2 cpus, 2048 MiB" in said
    assert "agent: mini-swe-agent 2" in said
    assert "grader: swebench 4.1.0" in said
    assert "4 transcripts checked, 1 tasks have none" in said
    assert "later-history: 1 tasks: click-4" in said
    found = reports.json("report", "latest", "--allow-loss")
    assert (found["headline"]["scored"], found["headline"]["suspect"]) == (4, 1)
    assert found["transcripts"]["rules"]["later-history"] == 1
    page = tmp_path / "page.html"
    reports("report", "latest", "--allow-loss", "--html", page)
    written = page.read_text()
    assert "50.0 %" in written
    assert "git log --all" in written
    assert "sha256:a" in written, "the image that was graded"
    assert not re.search(r"<script|src=|href=|@import|url\(", written), "it needs nothing else"
    with pytest.raises(ExportRefused, match="does not exist yet"):
        reports("report", "latest", "--allow-loss", "--html", page)
    assert page.read_text() == written
    reports.run("lost", {"click-5": LOST})
    said = reports("report", "lost", "--allow-loss")
    assert "no transcripts checked, 1 tasks have none" in said
    assert "no rule found anything" not in said


def test_transcripts_of_an_ended_run_are_checked_once_and_stand_beside_the_score(
    reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = reports.run("night", NIGHT)
    said = reports("report", "night", "--allow-loss")
    assert said.index("later-history: 1 tasks: click-4") < said.index("depends on")
    kept = reports.store.get(f"runs/{run_id}/transcript_checks.json")
    with monkeypatch.context() as patched:
        patched.setattr(transcripts, "check_run", None)  # would fail
        assert reports.json("report", "night", "--allow-loss")["transcripts"]["rules"]["later-history"] == 1
    with reports.database.begin() as connection:
        connection.execute(text("UPDATE tasks SET end_reason = 'step_limit' WHERE name = 'click-1'"))
    reports("report", "night", "--allow-loss")
    assert reports.store.get(f"runs/{run_id}/transcript_checks.json") != kept
    monkeypatch.setattr(transcripts, "_MOST_RUN_BYTES", 200)
    reports.store.put(f"runs/{run_id}/transcript_checks.json", b"{")
    assert "not read: too large in all" in reports("report", "night", "--allow-loss")


def kept(store: ArtifactStore, key: str) -> bytes | None:
    try:
        return store.get(key)
    except ArtifactMissing:
        return None


def test_transcripts_are_checked_when_a_run_has_ended(reports: Reports) -> None:
    key = f"runs/{reports.run('night', NIGHT)}/transcript_checks.json"
    checks = TranscriptChecks(reports.settings, reports.database)
    auditor = Auditor(reports.database, reports.settings, checks.add)
    with reports.database.begin() as connection:  # a receipt waits no longer for what the run had
        connection.execute(text("UPDATE tasks SET finished_at = finished_at - interval '1 h'"))
    with in_background(auditor.run), in_background(checks.run):
        found = json.loads(eventually(lambda: kept(reports.store, key), "checked transcripts"))
    assert found["found"]["rules"]["later-history"] == 1


def test_a_suspect_verdict_shows_wherever_a_reward_does(reports: Reports) -> None:
    reports.run("night", NIGHT)
    said = reports("status", "night")
    (columns,) = (one.split("\t") for one in said.splitlines() if one.startswith("id\t"))
    assert len(set(columns)) == len(columns), "each has a name of its own"
    assert "0 suspect" in said
    assert (
        "2 of 4 scored solved (95 %: 15 to 85 %), mean reward 0.500, 1 suspect counted as 0; 1 of 5 not scored" in said
    )
    assert reports.json("status", "night")["runs"][0]["suspect"] == 1
    assert "2/4 (1 suspect)" in reports("runs")
    shown = reports("show", "click-4")
    assert "reward 0 suspect" in shown
    assert "suspect by the rule conftest-hook; the grading would have given 1" in shown
    assert "resources: 2 cpus, 2048 MiB guaranteed; kill at 6 cpus, 6144 MiB" in shown
    assert "out of memory: 2 killed at the memory limit of 6442450944 bytes (2 in agent)" in shown
    assert "the host was short of memory: 1 killed (1 in agent), not for the task's limit" in shown
    assert "throttled: 7.5 s at the limit of 6 processors (7.5 in agent)" in shown


def test_a_misspelt_run_or_task_names_the_nearest(reports: Reports) -> None:
    reports.run("nightly-7", {"click-1": verdict(1.0)})
    with pytest.raises(UnknownName, match=r"unknown run 'nightly-6'; did you mean nightly-7\?"):
        reports("report", "nightly-6")
    with pytest.raises(UnknownName, match=r"unknown task 'clikc-1'; did you mean click-1\?"):
        reports("show", "clikc-1")


def test_two_runs_are_compared_task_by_task_and_refused_where_more_differs(reports: Reports) -> None:
    reports.run("one", {f"click-{n}": verdict(float(n % 2)) for n in range(8)})
    reports.run("two", {f"click-{n}": verdict(float(n % 2 or n == 0)) for n in range(8)})
    reports.run("new", {f"click-{n}": verdict(1.0) for n in range(8)}, version="3")
    said = reports("compare", "one", "two", "--power", "0.3")
    assert "+12.5 points on 8 tasks of both" in said
    assert "the interval contains 0: chance alone may give this" in said
    assert "solved 1 that the other did not: click-0" in said
    assert "to show a difference of 30 points four times in five:" in said
    assert reports.json("compare", "one", "two")["only_second"] == ["click-0"]
    with pytest.raises(ReportRefused, match=r"mini-swe-agent 2 and mini-swe-agent 3.*--allow agent"):
        reports("compare", "one", "new")
    assert reports.json("compare", "one", "new", "--allow", "agent")["differs"]["agent"]


def test_a_report_is_drawn_into_a_file(reports: Reports, tmp_path: Path) -> None:
    names = {"click-1": verdict(1.0), "click-2": verdict(0.0), "multi-7": verdict(1.0)}
    run_id = reports.run("a $\\frac run", names, replicas=2)
    drawn, pixels = tmp_path / "night.svg", tmp_path / "night.png"
    reports("report", run_id, "--plot", drawn)
    said = unescape(" ".join(re.findall("<!-- (.*?) -->", drawn.read_text())))
    for expected in (
        "pass rate, with its 95 % interval", "all (6)", "repository: pallets/click (4)", r"a $\frac run",
        "6 tasks scored",
    ):  # fmt: skip
        assert expected in said, said
    reports.json("report", run_id, "--plot", pixels)
    assert pixels.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ExportRefused, match="does not exist yet"):
        reports("report", run_id, "--plot", pixels)
    with pytest.raises(OptionInvalid, match=r"ends in .png or .svg, found .*night.pdf"):
        reports("report", run_id, "--plot", tmp_path / "night.pdf")
    assert sorted(tmp_path.glob("night*")) == [pixels, drawn]


def test_a_diagnosis_groups_failures_and_names_tasks(reports: Reports) -> None:
    other = Failure(error="ImageUnavailable", message="=no image 18", phase=Phase.CLAIMED)
    reports.run("bad", {"click-1": LOST, "click-2": other, "click-3": verdict(1.0)})
    said = reports("diagnose", "bad")
    assert "2 environment_error: ImageUnavailable after claimed" in said
    assert re.search("=no image 1[78]", said), "the message of one of them"
    assert "megaflow show" in said
    assert [one["count"] for one in reports.json("diagnose", "bad")] == [2]
    reports.run("good", {"click-1": verdict(1.0)})
    assert "nothing failed" in reports("diagnose", "good")


# --- Exports --------------------------------------------------------------------------------------------------------


def test_predictions_are_lines_that_swebench_reads(reports: Reports, tmp_path: Path) -> None:
    reports.run("night", NIGHT)
    file = tmp_path / "preds.jsonl"
    assert "4 written" in reports("export", "night", "--format", "predictions", "--to", file)
    lines = {one["instance_id"]: one for one in map(json.loads, file.read_text().splitlines())}
    assert lines["click-1"] == {
        "instance_id": "click-1",
        "model_name_or_path": "mini-swe-agent__big-one",
        "model_patch": PATCH.decode(),
    }
    assert lines["click-4"]["suspect"] == "conftest-hook"
    assert "click-5" not in lines
    with pytest.raises(ExportRefused, match="does not exist yet"):
        reports("export", "night", "--format", "predictions", "--to", file)
    assert [path.name for path in tmp_path.iterdir()] == ["preds.jsonl"]


def test_rows_of_multi_swe_bench_become_its_own_predictions(reports: Reports, tmp_path: Path) -> None:
    reports.run("multi", {"multi-7": verdict(1.0), "multi-8": verdict(0.0)})
    reports("export", "multi", "--format", "predictions", "--to", tmp_path / "multi.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "multi.jsonl").read_text().splitlines()]
    assert {"org": "cli", "repo": "cli", "number": 7, "fix_patch": PATCH.decode()} in lines
    assert [set(line) for line in lines] == [{"org", "repo", "number", "fix_patch"}] * 2
    reports.run("both", {"multi-7": verdict(1.0), "click-1": verdict(0.0)})
    with pytest.raises(ExportRefused, match=r"'multi-7' of Multi-SWE-bench and 'click-1'"):
        reports("export", "both", "--format", "predictions", "--to", tmp_path / "both.jsonl")


def test_an_instance_twice_is_refused_and_a_replica_can_be_chosen(reports: Reports, tmp_path: Path) -> None:
    reports.run("twice", {"click-1": verdict(1.0)}, replicas=2)
    file = tmp_path / "preds.jsonl"
    with pytest.raises(ExportRefused, match=r"'click-1' of mini-swe-agent \(replica 0\).*--replica N"):
        reports("export", "twice", "--format", "predictions", "--to", file)
    assert list(tmp_path.iterdir()) == []
    assert reports.json("export", "twice", "--format", "predictions", "--to", file, "--replica", 1)["written"] == 1
    with pytest.raises(ExportRefused, match="none that were chosen"):
        reports("export", "twice", "--format", "csv", "--to", tmp_path / "x.csv", "--agent", "other")


def test_a_scripted_task_is_neither_scored_nor_solved(reports: Reports, tmp_path: Path) -> None:
    run_id = reports.run("night", {"click-1": verdict(1.0)})
    assert "1 of 1 scored tasks are on images that were not validated" in reports("status", "night")
    with reports.database.begin() as connection:
        connection.execute(text("UPDATE tasks SET scripted = true WHERE run_id = :run"), {"run": run_id})
    assert "scored tasks" not in reports("status", "night")
    reports("export", "night", "--format", "csv", "--to", tmp_path / "csv")
    with (tmp_path / "csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["scripted"], row["scored"], row["solved"], row["reward"]) == ("true", "false", "false", "1.0")


def test_tables_have_a_row_per_task_with_its_marks(reports: Reports, tmp_path: Path) -> None:
    reports.run("night", NIGHT)
    for form in ("csv", "parquet"):
        assert "5 written" in reports("export", "night", "--format", form, "--to", tmp_path / form)
    with (tmp_path / "csv").open(newline="") as file:
        rows = {row["task"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"click-1", "click-2", "click-3", "click-4", "click-5"}
    assert rows["click-5"]["message"] == "'=no image 17"  # no formula for a spreadsheet
    for name, expected in (
        ("click-1", {"reward": "1.0", "solved": "true", "tests_passed": "1"}),
        ("click-4", {"suspect": "conftest-hook", "claimed_reward": "1.0"}),
        ("click-5", {"scored": "false", "reward": "", "error": "ImageUnavailable"}),
    ):
        assert {column: rows[name][column] for column in expected} == expected
    table = {row["task"]: row for row in pq.read_table(tmp_path / "parquet").to_pylist()}
    assert table["click-4"]["suspect"] == "conftest-hook"
    assert table["click-5"]["reward"] is None
    assert table["click-1"]["agent_version"] == "2"
    assert table["click-1"]["repository"] == "pallets/click"
    assert (table["click-1"]["memory_kills"], table["click-1"]["throttled_s"]) == (2, 7.5)
    assert rows["click-1"]["resources"] == "2 cpus, 2048 MiB guaranteed; kill at 2 cpus, 2048 MiB"


def test_a_harbor_job_has_a_folder_per_trial_with_result_and_evidence(reports: Reports, tmp_path: Path) -> None:
    reports.run("night", NIGHT)
    said = reports.json("export", "night", "--format", "harbor", "--to", tmp_path / "h")
    assert said["written"] == 5
    assert any("1 trials of a task; the leaderboard asks for 5" in note for note in said["notes"])
    job = tmp_path / "h" / "night"
    trials = {json.loads(file.read_text())["task_name"]: file.parent for file in job.glob("*/result.json")}
    assert set(trials) == set(NIGHT)
    good, bad, lost = (
        json.loads((trials[name] / "result.json").read_text()) for name in ("click-1", "click-4", "click-5")
    )
    assert good["verifier_result"] == {"rewards": {"reward": 1.0}}
    assert good["agent_info"] == {
        "name": "mini-swe-agent",
        "version": "2",
        "model_info": {"name": "big-one", "provider": None},
    }
    assert (trials["click-1"] / "verifier" / "reward.txt").read_text() == "1\n"
    assert (trials["click-1"] / "artifacts" / "patch.diff").read_bytes() == PATCH
    assert json.loads((trials["click-1"] / "agent" / "trajectory.json").read_text())["steps"]
    assert bad["verifier_result"] == {"rewards": {"reward": 0.0}}
    assert bad["agent_result"]["metadata"]["suspect"] == "conftest-hook"
    assert lost["verifier_result"] is None
    assert lost["exception_info"]["exception_type"] == "ImageUnavailable"
    stats = json.loads((job / "result.json").read_text())["stats"]
    assert (stats["n_completed_trials"], stats["n_errored_trials"]) == (5, 1)
    (one,) = stats["evals"].values()
    assert {reward: len(names) for reward, names in one["reward_stats"]["reward"].items()} == {"1.0": 2, "0.0": 2}
    assert "agent_url: ''" in (tmp_path / "h" / "metadata.yaml").read_text()


def test_trajectories_are_copied_as_stored_with_an_index(reports: Reports, tmp_path: Path) -> None:
    reports.run("night", {"a/../../etc": SUSPECT, "click-5": LOST})
    found = reports.json("export", "night", "--format", "atif", "--to", tmp_path / "t")
    assert (found["written"], found["left_out"]) == (1, {"no trajectory in the artifact store": 1})
    (line,) = map(json.loads, (tmp_path / "t" / "index.jsonl").read_text().splitlines())
    assert (line["task"], line["suspect"], line["attempt"]) == ("a/../../etc", "conftest-hook", 1)
    assert json.loads((tmp_path / "t" / line["file"]).read_text())["steps"]
    assert [path.parent.parent for path in (tmp_path / "t").rglob("*.json")] == [tmp_path / "t"]


def test_a_patch_that_json_cannot_hold_is_left_out_by_name(reports: Reports, tmp_path: Path) -> None:
    run_id = reports.run("night", {"click-1": verdict(1.0), "click-2": verdict(1.0)})
    (first, _) = results.results(reports.database, results.task_ids(reports.database, run_id))
    key = next(one.key for one in first.artifacts if one.kind is ArtifactKind.PATCH)
    assert key is not None
    reports.store.put(key, b"\xff\xfe")
    found = reports.json("export", "night", "--format", "predictions", "--to", tmp_path / "p.jsonl")
    assert found["written"] == 1
    assert found["left_out"] == {"its patch is not UTF-8, which JSON cannot hold": 1}
    assert any(first.name in note for note in found["notes"])


def test_an_export_that_breaks_leaves_nothing(
    reports: Reports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports.run("night", NIGHT)
    monkeypatch.setattr("app.evaluation.export.safe_name", Mock(side_effect=OSError(28, "no room")))
    with pytest.raises(OSError, match="no room"):
        reports("export", "night", "--format", "atif", "--to", tmp_path / "t")
    assert list(tmp_path.iterdir()) == []
