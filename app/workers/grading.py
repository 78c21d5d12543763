"""Grades what an agent left, and decides whose fault it is when that breaks.

Apart: in an environment in which the agent never was. In place: where it acted, restarted, so that none of its
processes lives and what runs the judge is the image's. A grading that breaks is the submission's own failure only when
it breaks the same way twice and the gold solution is graded cleanly in between; else nothing was scored.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog

from app.agents.base import AgentJob
from app.environments.contract import Environment
from app.errors import (
    AgentFailed,
    EnvironmentFailed,
    EnvironmentOverLimit,
    GradingFailed,
    NotRestarted,
    SpecInvalid,
)
from app.grading import protected
from app.grading.base import BROKE_GRADING, Grade, GradingInput, HandedOver
from app.grading.tests_goal import gold_patch
from app.host import archives
from app.models.endings import reward_by_rule
from app.models.outcome import Artifact, ArtifactKind, Phase, StoredPath, Verdict
from app.models.shell import DecideFile, Restart
from app.models.spec import PatchSolution, ScriptGoal, ScriptSolution
from app.workers.attempt_context import AttemptContext, AttemptProgress
from app.workers.environments import environment_for

__all__ = ["broke_grading", "grade", "judge"]

log = structlog.get_logger()

_STEP_TIMEOUT_S = 60.0
_MOST_HANDED_OVER_BYTES = 512 << 20
"""Of all that a verifier apart gets: it passes through the worker's memory."""


def grade(progress: AttemptProgress) -> AttemptProgress:
    """Grade what the agent left. Raises: Stopped, and what the grader and the environments raise."""
    context = progress.context
    context.limits_met.look()  # until now it was the agent's
    context.limits_met.stage = "grading"
    if progress.grader.fresh_environment:
        environment = context.open.enter_context(environment_for(context, "grading"))
        restart = Restart(killed=0)
    else:
        environment = progress.the_environment
        try:
            restart = restarted(progress)
        except NotRestarted as error:
            return recorded(progress, _not_restarted(progress, error))
    try:
        graded = _judged(progress, environment)
    except GradingFailed as error:
        graded = _whose_fault(progress, environment, error)
    return recorded(progress, replace(graded, verdict=_after_restart(graded.verdict, restart)))


def collect(progress: AttemptProgress) -> AttemptProgress:
    """Take what a verifier apart is to have of the agent's environment; what is not there is left out.

    Raises: AgentFailed: it is too large; EnvironmentFailed.
    """
    goal = progress.context.claimed.spec.task.goal
    if not isinstance(goal, ScriptGoal) or goal.environment is None:
        return progress
    return replace(progress, handed_over=tuple(_handed_over(progress.the_environment, goal.artifacts)))


def _handed_over(environment: Environment, paths: Sequence[str]) -> Iterator[HandedOver]:
    """Without links: in the verifier's environment they would lead to its own files."""
    left_bytes = _MOST_HANDED_OVER_BYTES
    for path in paths:
        try:
            content, is_folder = _read(environment, path)
        except FileNotFoundError:
            continue
        left_bytes -= len(content)
        if left_bytes < 0:
            raise AgentFailed(f"expected artifacts of at most {_MOST_HANDED_OVER_BYTES >> 20} MiB; found more")
        yield HandedOver(path, content, is_folder)


def _read(environment: Environment, path: str) -> tuple[bytes, bool]:
    """A folder's tar or a file's content, and whether it is a folder.

    Raises: FileNotFoundError; AgentFailed: what the agent has put there cannot be read; EnvironmentFailed.
    """
    try:
        try:
            tree = environment.get_tree(path)
        except FileNotFoundError:
            return environment.get(path), False
        return archives.plain_files(tree, limit_bytes=_MOST_HANDED_OVER_BYTES), True
    except (EnvironmentFailed, SpecInvalid, ValueError) as error:
        if type(error) not in (EnvironmentFailed, SpecInvalid, ValueError):
            raise  # it is the environment that has ended, not what is in it
        environment.assure()
        raise AgentFailed(f"expected an artifact that can be handed over at {path}; found: {error}") from error


def store_handed_over(
    progress: AttemptProgress, key: str, secrets: Sequence[str]
) -> tuple[Artifact | None, tuple[StoredPath, ...]]:
    """Store for a grader what was collected, under `key`; None: nothing was.

    A secret is overwritten in its length: an archive stays one. Raises: ArtifactStoreUnavailable, DiskFull.
    """
    if not progress.handed_over:
        return None, ()
    paths, file = [], progress.context.scratch / "handed_over"
    with file.open("wb") as bundle:
        for one in progress.handed_over:
            content = one.content
            for secret in secrets:
                content = content.replace(secret.encode(), b"*" * len(secret))
            bundle.write(content)
            paths.append(StoredPath(path=one.path, is_folder=one.is_folder, size_bytes=len(content)))
    with file.open("rb") as bundle:
        digest = hashlib.file_digest(bundle, "sha256").hexdigest()
    url, size = progress.context.services.store.put_file(key, file), file.stat().st_size
    return Artifact(kind=ArtifactKind.HANDED_OVER, key=key, url=url, size_bytes=size, sha256=digest), tuple(paths)


def judge(progress: AttemptProgress, detail: str) -> AttemptProgress:
    """Give no reward without a grader: the agent itself ended what could be graded."""
    verdict = Verdict(reward=0.0, counts=True, detail=detail)
    return recorded(progress, Grade(verdict, report=verdict.detail.encode()))


def recorded(progress: AttemptProgress, graded: Grade) -> AttemptProgress:
    """Keep the grade as evidence, and record that it was reached. Raises: Stopped; StaleWriter; HostOutOfMemory."""
    context, rules = progress.context, progress.context.claimed.spec.rewards
    context.limits_met.refuse_host_kills()
    if people := context.journal.shells:
        rule = f"a shell was opened in the agent's environment by {', '.join(sorted(set(people)))}"
        graded = replace(graded, verdict=graded.verdict.suspected(rule))
    if rules and progress.report is not None:
        reward = reward_by_rule(rules, progress.report.end_reason)
        graded = replace(graded, verdict=graded.verdict.ruled(reward))
    context.evidence.grade(graded)
    context.record_phase(Phase.GRADED, **context.limits_met.look())
    return replace(progress, grade=graded)


def restarted(progress: AttemptProgress) -> Restart:
    """End all that the agent started, and have the judge's tools as the image has them."""
    context, environment = progress.context, progress.the_environment
    progress.agent_scope.close()  # what is kept of the agent's environment is kept before
    context.limits_met.leave(environment)
    restart = environment.restart(_protection(progress))
    if "/etc/ld.so.cache" in restart.put_back:  # made again by the image's own program, with what was installed
        environment.run("ldconfig", timeout_s=_STEP_TIMEOUT_S)
    context.limits_met.watch(environment)
    context.teardown["agent"]["restart"] = {
        "killed": restart.killed,
        "put_back": list(restart.put_back[:20]),
        "suspect": list(restart.suspect[:20]),
    }
    if restart.put_back or restart.suspect:
        log.warning("grading.files_put_back", put_back=restart.put_back[:5], suspect=restart.suspect[:5])
    return restart


def _not_restarted(progress: AttemptProgress, error: NotRestarted) -> Grade:
    """The grade of one who left an environment that does not start, twice, where an untouched one does in between.

    Raises: NotRestarted: it is not its fault; EnvironmentFailed.
    """
    with environment_for(progress.context, "grading-gold") as clean:
        clean.restart(_protection(progress))
        clean.run("true", timeout_s=_STEP_TIMEOUT_S)
    progress.context.raise_if_stopped()
    try:
        progress.the_environment.restart(_protection(progress))
    except NotRestarted as second:
        return broke_grading(GradingFailed(str(second)))
    raise error


def _protection(progress: AttemptProgress) -> DecideFile:
    task = progress.context.claimed.spec.task
    return partial(protected.decide, workdir=task.environment.workdir or "", stated=task.description)


def _after_restart(verdict: Verdict, restart: Restart) -> Verdict:
    """The verdict with what was done before it: a reader of an unexpected 0 sees which files were not the agent's."""
    told = [path for path in restart.put_back if "__pycache__" not in path and "/.cache/" not in path]
    if told:
        more = f" and {len(told) - 3} more" if len(told) > 3 else ""
        note = f"{verdict.detail}; the image's again before the tests: {', '.join(told[:3])}{more}"
        verdict = verdict.model_copy(update={"detail": note})
    if restart.killed:
        note = f"{verdict.detail}; {restart.killed} processes were ended before the tests"
        verdict = verdict.model_copy(update={"detail": note})
    suspect = ", ".join(restart.suspect[:3])
    return verdict.suspected(f"files that could change the judgement: {suspect}" if suspect else "")


def _judged(progress: AttemptProgress, environment: Environment) -> Grade:
    """The submission's grade. What a control among the tests may have caused is graded again without one.

    In another environment: what it left in the first would judge the second run. One that was caught by the control
    stays caught, but where the gold solution is, too.
    """
    task = progress.context.claimed.spec.task
    key = hashlib.sha256(f"{task.goal.model_dump_json()}{task.environment.model_dump_json()}".encode()).hexdigest()
    usable = _controls.get(key)
    quiet_s = _QUIET_S if usable is None else None
    graded = _graded_in(progress, environment, progress.patch, control=usable is not False, quiet_s=quiet_s)
    if usable is False or not graded.doubtful or (usable and (graded.unended or graded.verdict.suspect)):
        return _ended(graded)
    if graded.unended or graded.verdict.suspect:
        usable = _learned(progress, key)
        if usable is not False and not graded.cut_short:
            return _ended(graded)
    control = graded.cut_short and usable is not False  # silence is no way around it
    log.warning("grading.again_for_control", task=task.name, unended=graded.unended, control=control)
    progress.context.raise_if_stopped()
    with environment_for(progress.context, "grading-again") as other:
        again = _graded_in(progress, other, progress.patch, control=control)
    if again.verdict.resolved and key not in _controls:
        _learned(progress, key)  # for the next submissions of this task
    return _ended(again)


def _learned(progress: AttemptProgress, key: str) -> bool | None:
    """Whether the gold solution passes beside a control; None: it fails without one, too, which says nothing of it."""
    usable: bool | None = _grades_gold_cleanly(progress, control=True, quiet_s=_QUIET_S)
    if not usable:
        began = time.monotonic()
        if not _grades_gold_cleanly(progress, control=False):
            return None
        # Tests that are quiet for long by themselves are given as long as all of them took.
        took_s = time.monotonic() - began
        usable = took_s > _QUIET_S and _grades_gold_cleanly(progress, control=True, quiet_s=took_s + _QUIET_S)
    if len(_controls) >= _MOST_CONTROLS:
        _controls.clear()
    _controls[key] = usable
    return usable


_QUIET_S = 120.0
"""A run beside a control of which nothing is known ends after as much silence."""
_controls: dict[str, bool] = {}
"""By task: whether its gold solution passes beside a control. Of this process."""
_MOST_CONTROLS = 4096


def _graded_in(
    progress: AttemptProgress,
    environment: Environment,
    patch: bytes | None,
    *,
    control: bool,
    quiet_s: float | None = None,
) -> Grade:
    context, task = progress.context, progress.context.claimed.spec.task
    tests = context.services.bundle(task.goal.tests) if isinstance(task.goal, ScriptGoal) else None
    shell = context.recorded(environment, "grading")
    graded = progress.grader.grade(GradingInput(task, patch, tests, progress.handed_over, control, quiet_s), shell)
    environment.assure()
    return graded


def _ended(graded: Grade) -> Grade:
    if graded.unended:
        raise TestsUnended(graded)
    return graded


class TestsUnended(GradingFailed):
    """The tests did not come to their end; `grade` is what there is of them."""

    def __init__(self, grade: Grade) -> None:
        super().__init__(grade.verdict.detail)
        self.grade = grade


def _whose_fault(progress: AttemptProgress, environment: Environment, error: GradingFailed) -> Grade:
    """The grade of the second try, or of a submission that broke both. Raises: GradingFailed: it is not its fault."""
    context = progress.context
    may_be_its_own = _changed_anything(progress) or context.claimed.spec.task.solution is not None
    if not may_be_its_own or not _grades_gold_cleanly(progress, control=False):
        raise error
    context.raise_if_stopped()
    log.warning("grading.again", error=str(error)[:200])
    try:
        if progress.grader.fresh_environment:
            with environment_for(context, "grading-again") as other:
                return _judged(progress, other)
        environment.restart(_protection(progress))
        return _ended(_graded_in(progress, environment, progress.patch, control=False))
    except GradingFailed as second:
        # Where the agent worked, what it left can count the tries, and break the second one otherwise.
        if progress.grader.fresh_environment and _kind_of_failure(second) != _kind_of_failure(error):
            raise error from second
        return broke_grading(error)


def broke_grading(error: GradingFailed) -> Grade:
    """Reward 0 for a submission that broke its own grading, with what broke."""
    detail = f"{BROKE_GRADING}: {error}"[:4000]
    if isinstance(error, TestsUnended):
        return replace(error.grade, verdict=error.grade.verdict.model_copy(update={"detail": detail}))
    return Grade(Verdict(reward=0.0, counts=True, detail=detail), report=str(error).encode())


def _changed_anything(progress: AttemptProgress) -> bool:
    """Whether there is a submission that could have broken it. A container that was acted in may have been changed."""
    submitted = (progress.patch or b"").strip() or progress.handed_over
    return bool(submitted) or not progress.grader.fresh_environment


def _grades_gold_cleanly(progress: AttemptProgress, *, control: bool, quiet_s: float | None = None) -> bool:
    """Whether the task's gold solution, or its untouched state, is graded cleanly on the same image."""
    context, task = progress.context, progress.context.claimed.spec.task
    solution = task.solution
    try:
        is_apart = isinstance(task.goal, ScriptGoal) and progress.grader.fresh_environment
        with environment_for(context, "gold" if is_apart else "grading-gold") as clean:
            if isinstance(solution, ScriptSolution):
                _solve(context, clean)
            if isinstance(task.goal, ScriptGoal) and is_apart:
                return _grades_gold_apart(progress, clean, task.goal)
            gold = gold_patch(task).encode() if isinstance(solution, PatchSolution) else None
            graded = _ended(_graded_in(progress, clean, gold, control=control, quiet_s=quiet_s))
    except (AgentFailed, GradingFailed, EnvironmentOverLimit) as error:
        log.warning("grading.gold_failed", error=str(error)[:200])
        return False
    reward = graded.verdict.reward
    return reward is not None and (solution is None or reward > 0)


def _grades_gold_apart(progress: AttemptProgress, solved: Environment, goal: ScriptGoal) -> bool:
    """The same, where the gold solution's artifacts are judged in an environment of the verifier's own."""
    gold = replace(progress, handed_over=tuple(_handed_over(solved, goal.artifacts)))
    with environment_for(progress.context, "grading-gold") as clean:
        reward = _ended(_graded_in(gold, clean, None, control=False)).verdict.reward
    return reward is not None and (progress.context.claimed.spec.task.solution is None or reward > 0)


def _solve(context: AttemptContext, environment: Environment) -> None:
    task, services = context.claimed.spec.task, context.services
    files = services.bundle(task.solution.files) if isinstance(task.solution, ScriptSolution) else None
    job = AgentJob(
        task_name=task.name,
        description=task.description,
        workdir=task.environment.workdir,
        limits=task.limits,
        model=None,
        solution=task.solution,
        solution_files=files,
        scratch=_folder(context.scratch / "gold"),
    )
    services.agent("oracle").run(job, environment, context.token)


def _folder(place: Path) -> Path:
    place.mkdir(exist_ok=True)
    return place


def _kind_of_failure(error: GradingFailed) -> tuple[str, str]:
    """What two failures have in common when they are the same: their kind, and what was expected.

    What was found instead may be the submission's own words, which it could make different each time.
    """
    if isinstance(error, TestsUnended):  # it chooses between a hang and a killed shell, too
        return type(error).__name__, ""
    return type(error).__name__, re.sub(r"\d+", "#", str(error).partition("found")[0])[:80]
