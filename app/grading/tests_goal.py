"""Grades a repository's goal: patches on a clean checkout, hidden tests, then the named tests, by the dataset's judge.

Source: SWE-bench's evaluation (apply, install, check out the test files, apply the test patch, run, parse). The verdict
is a result whenever the patch causes a failure, also when it does not apply. For tests without an end, the worker
decides whose fault it is (`Grade.unended`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import structlog

from app.errors import TestRunnerMissing
from app.grading import control_test, judges, patches, restore
from app.grading.base import NO_SUCH_PROGRAM, Grade, GradingInput, out_of_memory
from app.grading.judges import Judgement
from app.grading.patch_words import names_repository
from app.grading.patches import tail, touched_files, with_last_newline
from app.grading.reports import contradiction, ended_early
from app.grading.resident_libraries import GradingLibraries
from app.grading.suite_run import StepResult, TestRun, run_step, run_tests
from app.models.outcome import TestStatus, Verdict
from app.models.shell import CommandResult, Shell
from app.models.spec import AgentTask, PatchSolution, TestsGoal

log = structlog.get_logger(__name__)

_NAMES_SHOWN = 5


class TestsGrader:
    """Grades `TestsGoal`."""

    __test__ = False
    fresh_environment: bool = True

    def __init__(self, goal: TestsGoal, libraries: GradingLibraries | None = None) -> None:
        """Raises: GradingFailed: no parser of that name, no test named."""
        judges.check_goal(goal)
        self._goal = goal
        self._libraries = libraries

    def grade(self, submission: GradingInput, shell: Shell) -> Grade:
        goal, limit_s = self._goal, submission.task.limits.grading_timeout_s
        patches.require_base(shell, goal.base_commit, submission.task.environment.workdir)
        patch = submission.patch or b""
        before = restore.runner_before(shell, goal) if goal.patch_path is None else {}
        if (refused := hand_over_patch(shell, goal, patch)) is not None:
            return _refused(refused)
        left_s = _clock(limit_s)
        text, gold = patch.decode("utf-8", "replace"), gold_patch(submission.task)
        removed = restore.remove_leavings(shell, goal, text, gold) if goal.patch_path is None else ()
        restored = (*removed, *restore.restore_runner(shell, goal, gold, before)) if goal.patch_path is None else ()
        steps, rule = _steps(shell, goal, left_s)
        rule = rule or restore.suspect_rule(
            text, gold, removed, restored=goal.patch_path is None, hidden=touched_files(goal.test_patch)
        )
        log.info("grading.tests_started", task=submission.task.name, timeout_s=limit_s)
        workdir, may = submission.task.environment.workdir, submission.control and bool(gold)
        control = control_test.place_control(shell, goal, workdir) if may else None
        before_run = restore.tests_before_run(shell, goal, workdir or "")
        if control is not None and f"{workdir}/{control.path}" in before_run:
            before_run[f"{workdir}/{control.path}"] = control.content  # not a version that a process may have changed
        several = goal.patch_path is None and control_test.runs_several(goal.test_command)
        before_tests = restore.files_before_tests(shell) if several else None
        command, quiet_s = (control.command, submission.quiet_s) if control else (goal.test_command, None)
        run = run_tests(shell, command, left_s(), quiet_s=quiet_s, steps=steps)
        if before_tests is not None:
            rule = rule or restore.made_for_next_run(shell, before_tests)
        rule = rule or restore.changed_by_run(shell, before_run)
        run = replace(run, rule=rule, control=control.name if control else "")
        verdict = self.verdict(run, limit_s=limit_s)
        doubtful = control is not None and _doubtful(control, run, verdict)
        if restored:
            detail = f"{verdict.detail}; restored from the base: {', '.join(restored[:_NAMES_SHOWN])}"
            verdict = verdict.model_copy(update={"detail": detail})
        if run.out_of_memory:
            verdict = verdict.model_copy(update={"detail": f"{verdict.detail}; {out_of_memory(submission)}"})
        return Grade(verdict, run.report(), unended=run.unended, doubtful=doubtful, cut_short=run.cut_short)

    def verdict(self, run: TestRun, *, limit_s: float) -> Verdict:
        """Returns the verdict of a run, also of a stored one (`read_report`). limit_s: of grading, for the detail.

        Raises: GradingFailed: the judge cannot judge; TestRunnerMissing.
        """
        judged = run.judged
        judgement = judges.judge(self._goal, judged, run.exit_code, self._libraries)
        statuses = judgement.statuses
        if run.exit_code in NO_SUCH_PROGRAM and set(statuses.values()) == {TestStatus.MISSING}:
            raise TestRunnerMissing(
                f"expected the test command to start; found exit code {run.exit_code}: "
                f"{judged[-800:].strip()}; is its program in the image?"
            )
        passed = sum(status is TestStatus.PASSED for status in statuses.values())
        whole_run = not run.timed_out and not run.broken_off
        verdict = Verdict(
            reward=1.0 if judgement.resolved and whole_run else 0.0,
            counts=True,
            detail=_detail(self._goal, judgement, run, limit_s),
            tests=statuses,
            metrics={
                "tests_passed": float(passed),
                "tests_total": float(len(statuses)),
                "partial": judges.partial_credit(self._goal, judgement) if whole_run else 0.0,
            },
            grader=judgement.grader,
        )
        if not verdict.resolved:
            return verdict
        goal = self._goal
        without_xfail = goal.fail_to_pass if goal.test_patch and "xfail" not in goal.test_patch else ()
        odd = judges.printed_marker(goal, judged) or contradiction(judged, statuses, goal.test_command, without_xfail)
        if run.control and run.is_cut:
            odd = odd or "its report is so long that the middle is left out, where a failure may have stood"
        of_control = control_test.control_rule(run.control, judged)
        of_control = of_control or control_test.end_rule(run.control, goal.test_command, run.exit_code)
        return verdict.suspected(run.rule or odd or of_control)


def _doubtful(control: control_test.ControlTest, run: TestRun, verdict: Verdict) -> bool:
    """Whether the control may be the reason for a missing reward: others failed with it, it was not reported, or the
    run did not finish.
    """
    if run.exit_code is None or verdict.resolved:
        return run.exit_code is None
    if verdict.suspect:
        return verdict.suspect == control_test.control_rule(run.control, run.judged)
    # A copy runs after its test, and before the next ones.
    one_passed = any(verdict.tests.get(name) is TestStatus.PASSED for name in control.originals)
    return one_passed or not control_test.control_failed(control.name, run.judged)


def hand_over_patch(shell: Shell, goal: TestsGoal, patch: bytes) -> CommandResult | None:
    """Applies the agent's patch, or writes it where the row's own script applies it. Returns a refusal, or None.

    A patch that names files of a git repository is refused: git would ignore the files next to them. Raises:
    EnvironmentFailed, DiskFull.
    """
    if line := names_repository(patch.decode("utf-8", "replace")):
        message = f"it names a file of a git repository (.git): {line}".encode("utf-8", "replace")
        return CommandResult(1, message, b"", timed_out=False, truncated=False, duration_s=0.0)
    if goal.patch_path is not None:
        shell.put(goal.patch_path, with_last_newline(patch) if patch else b"")
        return None
    if not patch.strip() or (applied := patches.apply_patch(shell, patch)).ok:
        return None
    return applied


def prepare_state(shell: Shell, goal: TestsGoal) -> None:
    """Writes the hidden tests, or their patch for the row's own script: between the agent's patch and the run.

    Raises: GradingFailed: they do not fit the image; EnvironmentFailed, DiskFull.
    """
    if goal.test_patch_path is not None:
        shell.put(goal.test_patch_path, with_last_newline(goal.test_patch.encode()))
        return
    patches.lay_out_tests(shell, goal.base_commit, goal.test_patch)


def gold_patch(task: AgentTask) -> str:
    """Returns the task's gold solution, if it is a patch; reversed if the dataset's patch is the bug."""
    if not isinstance(task.solution, PatchSolution):
        return ""
    return patches.reversed_patch(task.solution.patch) if task.solution.reverse else task.solution.patch


def _steps(shell: Shell, goal: TestsGoal, left_s: Callable[[], float]) -> tuple[tuple[StepResult, ...], str]:
    """Runs all steps between patch and tests. Returns them, and the rule if an installation changed the test runner.

    A failed step is in the report, and the tests run all the same. Source: swebench 4.1.0: its evaluation scripts run
    without `set -e`.
    """
    steps: list[StepResult] = []
    rule = ""
    if goal.install_command.strip():
        before = restore.runner_state(shell)
        steps.append(run_step(shell, "install_command", goal.install_command, left_s()))
        rule = restore.changed_by_install(shell, before)
    prepare_state(shell, goal)
    if goal.build_command.strip():
        steps.append(run_step(shell, "build_command", goal.build_command, left_s()))
    return tuple(steps), rule


def _clock(limit_s: float) -> Callable[[], float]:
    until = time.monotonic() + limit_s
    return lambda: max(0.1, until - time.monotonic())


def _detail(goal: TestsGoal, judgement: Judgement, run: TestRun, limit_s: float) -> str:
    if run.timed_out:
        return f"tests did not end within {limit_s:g} s"
    if run.broken_off:
        return "the test command was killed before its end, by what ran in it"
    statuses, wrong = judgement.statuses, judges.broken(goal, judgement.statuses)
    if not wrong and not judgement.resolved:
        return f"{judgement.grader} finds the task not resolved; its tests' exit code was {run.exit_code}"
    if judgement.resolved:
        beside = f", but for {len(wrong)} that its rule leaves out" if wrong else ""
        return f"all {len(statuses)} tests are as they should be{beside}"
    shown = ", ".join(f"{name} {statuses[name]}" for name in wrong[:_NAMES_SHOWN])
    more = f" and {len(wrong) - _NAMES_SHOWN} more" if len(wrong) > _NAMES_SHOWN else ""
    any_reported = set(statuses.values()) != {TestStatus.MISSING}
    hint = "" if any_reported else "; the report has none of these names: compare them with it (`megaflow logs TASK`)"
    if hint and (early := ended_early(run.judged, goal.test_command)):
        hint = f"; {early}, with exit code {run.exit_code}"
    if hint and any(name in run.judged for name in wrong):
        hint = f"; {judgement.grader} gave no result for them (`megaflow logs TASK`)"
    return f"{len(wrong)} of {len(statuses)} tests did not pass: {shown}{more}{hint}"


def _refused(applied: CommandResult) -> Grade:
    verdict = Verdict(
        reward=0.0,
        counts=True,
        detail=f"the patch does not apply: {tail(applied)}",
        metrics={"partial": 0.0},
        grader=judges.own_name(),
    )
    return Grade(verdict, applied.stdout + applied.stderr)
