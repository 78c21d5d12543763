"""Judges the finished attempts of a run again, without agents: from stored test reports, else from patches."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import structlog

from app.artifacts import ArtifactStore
from app.artifacts.bundles import fetch_bundle
from app.errors import ArtifactChanged, ArtifactMissing, GradingFailed, StationError, TestRunnerMissing
from app.grading import grader_for
from app.grading.base import BROKE_GRADING, GradingInput, HandedOver, out_of_memory
from app.grading.resident_libraries import GradingLibraries
from app.grading.suite_run import TestRun, read_report
from app.grading.tests_goal import TestsGrader
from app.ledger import ends, gradings, report_rows, results
from app.ledger.database import Database
from app.ledger.report_rows import ReportRow
from app.models.endings import EndReason, reward_by_rule
from app.models.outcome import AgentResult, Artifact, ArtifactKind, AttemptRecord, TaskResult, Verdict
from app.models.shell import Shell
from app.models.spec import AgentTask, TestsGoal, Wire
from app.models.states import AttemptState, TaskState

log = structlog.get_logger()

_ALIKE = ("reward", "counts", "tests", "suspect", "claimed_reward", "grader")
"""Fields to compare: a verdict that differs in none of them from the current one is not stored."""


class Flip(Wire):
    """An attempt whose reward changed. None: not scored."""

    task_id: str
    name: str
    replica: int
    agent: str
    before: float | None
    after: float | None
    detail: str

    @classmethod
    def of(cls, row: ReportRow, before: Verdict, after: Verdict) -> Flip:
        who = {"task_id": str(row.task_id), "name": row.name, "replica": row.replica, "agent": row.agent}
        return cls.model_validate({**who, "before": before.reward, "after": after.reward, "detail": after.detail})


class RegradeSummary(Wire):
    """Outcome of a regrade. `stored`: verdicts that differ from the current ones in a field of `_ALIKE`."""

    judged: int = 0
    stored: int = 0
    solved_now: int = 0  # 0 to 1
    unsolved_now: int = 0  # 1 to 0
    unscored_now: int = 0
    flips: tuple[Flip, ...] = ()
    queued: int = 0  # gradings without a score, queued for graders again
    left_out: dict[str, int] = {}  # by reason


VerifierPlace = Callable[[AgentTask], AbstractContextManager[Shell]]
"""Creates an environment for the block, in which a task can be graded."""
_OTHER_GRADER = "judged by another grader"
_IN_PLACE = "its script judged where the agent worked, which is gone: submit the task again"
_APART = "its goal is a script, whose report does not say all that the script saw: `--anew` grades what was handed over"
_NOT_GRADED = "its grading never came to a score: `--anew` alone has graders do it again"
_NO_SUBMISSION = "it ended before anything was left to a grader: `megaflow retry RUN` runs the agent again"


class _LeftOut(Exception):
    """Raised when an attempt cannot be regraded; its text is the counted reason."""


@dataclass(slots=True)
class _Regrade:
    """A regrade of a run. grader: the grader whose verdicts are judged again; None: all. place: as in `regrade`."""

    store: ArtifactStore
    libraries: GradingLibraries | None
    grader: str | None
    place: VerifierPlace | None = None
    at: datetime = field(default_factory=lambda: datetime.now(UTC))

    def again(self, row: ReportRow, result: TaskResult) -> tuple[Verdict, Verdict] | str:
        """Returns the current verdict and the new one, or why there is no new one."""
        try:
            last = result.attempt
            if last is None or last.state is not AttemptState.FINISHED or last.verdict is None:
                raise _LeftOut(_ungraded(row))
            goal = row.spec["task"]["goal"]
            if goal["kind"] != "tests":
                raise _LeftOut(_APART if goal.get("environment") else _IN_PLACE)
            if self.grader is not None and last.verdict.grader != self.grader:
                raise _LeftOut(_OTHER_GRADER)
            run = self._run(last)
            return last.verdict, self._verdict(row, TestsGoal.model_validate(goal), run, last.verdict)
        except _LeftOut as reason:
            return str(reason)

    def anew(self, database: Database, row: ReportRow, result: TaskResult, why: str) -> tuple[Verdict, Verdict] | str:
        """Grades the submission in a fresh environment, as `again` returns it. why: the reason that `again` gave."""
        last, task, place = result.attempt, AgentTask.model_validate(row.spec["task"]), self.place
        if place is None or why == _OTHER_GRADER or last is None or last.verdict is None:
            return why
        try:
            submitted = self._submitted(task, last)
            if submitted is None:
                return why
            log.info("regrade.anew", task=task.name, why=why)
            with place(task.model_copy(update={"environment": task.verifier})) as shell:
                graded = grader_for(task.goal, self.libraries).grade(submitted, shell)
            if graded.unended:
                raise GradingFailed("expected tests that come to their end; found " + graded.verdict.detail)
            if graded.doubtful:
                raise GradingFailed("expected a verdict without doubt; found one that the control may have caused")
        except (ArtifactMissing, GradingFailed, StationError) as error:
            return f"{why}; nor graded anew: {str(error).partition(' found')[0][:160]}"
        if (stored_key := next((one.key for one in last.artifacts if one.key), None)) is None:
            return why
        folder = stored_key.rpartition("/")[0]
        key, digest = f"{folder}/regraded_report.txt", hashlib.sha256(graded.report).hexdigest()
        url, size = self.store.put(key, graded.report), len(graded.report)
        report = Artifact(kind=ArtifactKind.TEST_REPORT, key=key, url=url, size_bytes=size, sha256=digest)
        with database.begin() as connection:
            ends.store_artifacts(connection, [(last.id, report)], {last.id})
        return last.verdict, self._ruled(row, graded.verdict.suspected(last.verdict.suspect))

    def _submitted(self, task: AgentTask, last: AttemptRecord) -> GradingInput | None:
        """Returns what the attempt left to a grader; None: it was graded where the agent worked, or nothing is stored.

        Raises: ArtifactMissing, ArtifactStoreUnavailable.
        """
        keys = {one.kind: one.key for one in last.artifacts}
        if isinstance(task.goal, TestsGoal):
            key = keys.get(ArtifactKind.PATCH)
            return None if key is None else GradingInput(task, self.store.get(key), None)
        if task.goal.environment is None or "submission" not in last.environment:
            return None
        left = AgentResult.model_validate(last.environment["submission"])
        bundle = self.store.get(left.bundle) if left.bundle else b""
        return GradingInput(task, None, fetch_bundle(self.store, task.goal.tests), HandedOver.split(bundle, left.paths))

    def _run(self, attempt: AttemptRecord) -> TestRun:
        assert attempt.verdict is not None
        if attempt.verdict.detail.startswith(BROKE_GRADING):
            raise _LeftOut("broke grading")
        artifact = next((one for one in attempt.artifacts if one.kind is ArtifactKind.TEST_REPORT), None)
        try:
            if artifact is None or artifact.key is None:
                raise _LeftOut("no test report kept")
            report = self.store.get(artifact.key)
            digest = hashlib.sha256(report).hexdigest()
            if artifact.sha256 is not None and digest != artifact.sha256:
                expected = f"expected the report that was recorded, sha256 {artifact.sha256}; found sha256 {digest}"
                raise ArtifactChanged(f"{artifact.key}: {expected}; put the recorded one back")
            if (run := read_report(report)).unended:
                raise _LeftOut("its tests did not end, and no report says whose fault that was")
            return run
        except ArtifactMissing as error:
            raise _LeftOut("its test report is gone from the artifact store") from error
        except GradingFailed as error:
            raise _LeftOut("no tests ran: a patch that did not apply, or an agent that ended all by itself") from error

    def _verdict(self, row: ReportRow, goal: TestsGoal, run: TestRun, before: Verdict) -> Verdict:
        task = row.spec["task"]
        try:
            verdict = TestsGrader(goal, self.libraries).verdict(run, limit_s=task["limits"]["grading_timeout_s"])
        except TestRunnerMissing as error:
            return Verdict(reward=None, counts=False, detail=str(error), grader=before.grader, suspect=before.suspect)
        except GradingFailed as error:
            raise _LeftOut(f"not judged: {str(error).partition(' found')[0][:160]}") from error
        if run.out_of_memory:
            killed = out_of_memory(GradingInput(AgentTask.model_validate(task), None, None))
            verdict = verdict.model_copy(update={"detail": f"{verdict.detail}; {killed}"})
        if before.suspect:
            verdict = verdict.suspected(before.suspect)
        elif verdict.resolved and not before.resolved and run.rule is None:
            raise _LeftOut("solved now, by a report that does not say whether a rule makes it suspect")
        return self._ruled(row, verdict)

    def _ruled(self, row: ReportRow, found: Verdict) -> Verdict:
        return found.ruled(reward_by_rule(row.spec.get("rewards") or {}, EndReason(str(row.end_reason))))


def _ungraded(row: ReportRow) -> str:
    """Returns why there is no verdict to replace."""
    if row.state != TaskState.FAILED:
        return "superseded or cancelled" if row.end_reason else "not ended yet"
    return _NOT_GRADED if "submission" in row.environment else _NO_SUBMISSION


def regrade(
    database: Database,
    store: ArtifactStore,
    libraries: GradingLibraries | None,
    run_id: UUID,
    *,
    grader: str | None = None,
    place: VerifierPlace | None = None,
) -> RegradeSummary:
    """Judges every stored report again and stores the verdicts that differ. grader: only verdicts of this grader.

    place: where attempts without a usable report are graded, one after the other; None: they are left out.
    With a place and no grader, gradings without a score are queued for graders again.

    Raises: ArtifactChanged, ArtifactStoreUnavailable, DatabaseUnavailable: verdicts stored before stay. Another call
    continues.
    """
    work, left_out, flips = _Regrade(store, libraries, grader, place), Counter[str](), list[Flip]()
    counts: Counter[str] = Counter()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for rows in report_rows.batches(database, run_id):
            tasks = results.results(database, [row.task_id for row in rows])
            due: dict[UUID, tuple[ReportRow, Verdict, Verdict]] = {}
            judged = list(pool.map(work.again, rows, tasks))
            broken = [t.attempt.id for t, why in zip(tasks, judged, strict=True) if t.attempt and why == _NOT_GRADED]
            queued = gradings.queue_again(database, broken) if place is not None and grader is None else set()
            counts["queued"] += len(queued)
            for row, task, again in zip(rows, tasks, judged, strict=True):
                if row.task_id in queued:
                    continue
                outcome = work.anew(database, row, task, again) if isinstance(again, str) else again
                if isinstance(outcome, str):
                    left_out[outcome] += 1
                    continue
                counts["judged"] += 1
                before, after = outcome
                if task.attempt is not None and _judgement(before) != _judgement(after):
                    due[task.attempt.id] = (row, before, after.after(before, work.at))
            stored = ends.regrade(database, {one: verdict for one, (_, _, verdict) in due.items()})
            counts["stored"] += len(stored)
            left_out["regraded by another at the same time"] += len(due) - len(stored)
            for attempt_id in due.keys() & stored:
                row, before, after = due[attempt_id]
                counts[_change(before, after)] += 1
                if before.reward != after.reward:
                    flips.append(Flip.of(row, before, after))
    flips.sort(key=lambda one: (one.name, one.agent, one.replica))
    named = {
        name: counts[name] for name in ("judged", "stored", "solved_now", "unsolved_now", "unscored_now", "queued")
    }
    return RegradeSummary(**named, flips=tuple(flips), left_out={why: n for why, n in left_out.most_common() if n})


def _judgement(verdict: Verdict) -> dict[str, Any]:
    return verdict.model_dump(include=set(_ALIKE))


def _change(before: Verdict, after: Verdict) -> str:
    if before.counts and not after.counts:
        return "unscored_now"
    if before.resolved == after.resolved:
        return "alike"
    return "solved_now" if after.resolved else "unsolved_now"
