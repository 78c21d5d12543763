"""Grades an agent's submission, and decides whose fault a broken grading is.

Either in a separate, fresh environment, or in the agent's environment after a restart: then none of the agent's
processes is alive and the programs that grade are the image's. A broken grading is the submission's fault only if it
breaks the same way twice and the gold solution is graded without error in between. Else the attempt is not scored.
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
"""Size limit of all files handed over to a separate verifier: they pass through the worker's memory."""


def grade(progress: AttemptProgress) -> AttemptProgress:
    """Grades the submission. Raises: Stopped; the errors of the grader and of the environments."""
    context = progress.context
    context.limits_met.look()  # kills until now are counted for the agent
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
    """Collects from the agent's environment the files for a separate verifier; skips missing files.

    Raises: AgentFailed: the files are too large; EnvironmentFailed.
    """
    goal = progress.context.claimed.spec.task.goal
    if not isinstance(goal, ScriptGoal) or goal.environment is None:
        return progress
    return replace(progress, handed_over=tuple(_handed_over(progress.the_environment, goal.artifacts)))


def _handed_over(environment: Environment, paths: Sequence[str]) -> Iterator[HandedOver]:
    """Reads the files without links: in the verifier's environment a link would point to the verifier's files."""
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
    """Returns a folder's tar or a file's content, and whether it is a folder.

    Raises: FileNotFoundError; AgentFailed: what the agent put there cannot be read; EnvironmentFailed.
    """
    try:
        try:
            tree = environment.get_tree(path)
        except FileNotFoundError:
            return environment.get(path), False
        return archives.plain_files(tree, limit_bytes=_MOST_HANDED_OVER_BYTES), True
    except (EnvironmentFailed, SpecInvalid, ValueError) as error:
        if type(error) not in (EnvironmentFailed, SpecInvalid, ValueError):
            raise  # the environment itself has ended; its content is not the cause
        environment.assure()
        raise AgentFailed(f"expected an artifact that can be handed over at {path}; found: {error}") from error


def store_handed_over(
    progress: AttemptProgress, key: str, secrets: Sequence[str]
) -> tuple[Artifact | None, tuple[StoredPath, ...]]:
    """Stores the collected files for a grader under `key`. Returns None if there are none.

    Secrets are overwritten by text of equal length: archives stay valid. Raises: ArtifactStoreUnavailable, DiskFull.
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
    """Gives reward 0 without a grader: the agent itself made grading impossible."""
    verdict = Verdict(reward=0.0, counts=True, detail=detail)
    return recorded(progress, Grade(verdict, report=verdict.detail.encode()))


def recorded(progress: AttemptProgress, graded: Grade) -> AttemptProgress:
    """Applies reward rules, adds the grade to the evidence. Raises: Stopped; StaleWriter; HostOutOfMemory."""
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
    """Ends all processes of the agent and restores the grading tools from the image."""
    context, environment = progress.context, progress.the_environment
    progress.agent_scope.close()  # saves the logs of the agent's environment first
    context.limits_met.leave(environment)
    restart = environment.restart(_protection(progress))
    if "/etc/ld.so.cache" in restart.put_back:  # rebuilt by the image's own program, with what was installed
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
    """Grades an environment that fails to restart twice while an untouched one starts in between: reward 0.

    Raises: NotRestarted: not the submission's fault; EnvironmentFailed.
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
    hidden = task.goal.tests_path if isinstance(task.goal, ScriptGoal) else ""
    workdir = task.environment.workdir or ""
    return partial(protected.decide, workdir=workdir, stated=task.description, hidden=hidden)


def _after_restart(verdict: Verdict, restart: Restart) -> Verdict:
    """Adds the restart's effects to the verdict: they show a reader of an unexpected 0 which files were restored."""
    restored = [path for path in restart.put_back if "__pycache__" not in path and "/.cache/" not in path]
    if restored:
        more = f" and {len(restored) - 3} more" if len(restored) > 3 else ""
        note = f"{verdict.detail}; the image's again before the tests: {', '.join(restored[:3])}{more}"
        verdict = verdict.model_copy(update={"detail": note})
    if restart.killed:
        note = f"{verdict.detail}; {restart.killed} processes were ended before the tests"
        verdict = verdict.model_copy(update={"detail": note})
    suspect = ", ".join(restart.suspect[:3])
    return verdict.suspected(f"files that could change the judgement: {suspect}" if suspect else "")


def _judged(progress: AttemptProgress, environment: Environment) -> Grade:
    """Returns the submission's grade. Grades again without the control if the control may have caused the result.

    The second environment is another one: files left in the first would affect the run. A submission caught by the
    control stays caught, unless the control also catches the gold solution.
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
    control = graded.cut_short and usable is not False  # a submission must not avoid the control by being silent
    log.warning("grading.again_for_control", task=task.name, unended=graded.unended, control=control)
    progress.context.raise_if_stopped()
    with environment_for(progress.context, "grading-again") as other:
        again = _graded_in(progress, other, progress.patch, control=control)
    if again.verdict.resolved and key not in _controls:
        _learned(progress, key)  # known for the next submissions of this task
    return _ended(again)


def _learned(progress: AttemptProgress, key: str) -> bool | None:
    """Whether the gold solution passes with a control. None: unknown, as it fails without a control too."""
    usable: bool | None = _grades_gold_cleanly(progress, control=True, quiet_s=_QUIET_S)
    if not usable:
        began = time.monotonic()
        if not _grades_gold_cleanly(progress, control=False):
            return None
        # Tests that are silent for a long time by nature get a silence limit of the whole duration of the tests.
        took_s = time.monotonic() - began
        usable = took_s > _QUIET_S and _grades_gold_cleanly(progress, control=True, quiet_s=took_s + _QUIET_S)
    if len(_controls) >= _MOST_CONTROLS:
        _controls.clear()
    _controls[key] = usable
    return usable


_QUIET_S = 120.0
"""Seconds of silence after which a run with a control ends, if it is unknown whether the control is usable."""
_controls: dict[str, bool] = {}
"""Cache of this process, by task: whether its gold solution passes with a control."""
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
    """The tests did not finish; `grade` is the partial result."""

    def __init__(self, grade: Grade) -> None:
        super().__init__(grade.verdict.detail)
        self.grade = grade


def _whose_fault(progress: AttemptProgress, environment: Environment, error: GradingFailed) -> Grade:
    """Grades again; reward 0 if the submission breaks this too. Raises: GradingFailed: not the submission's fault."""
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
        # Files in the agent's environment can count the tries and break the second in another way: not compared there.
        if progress.grader.fresh_environment and _kind_of_failure(second) != _kind_of_failure(error):
            raise error from second
        return broke_grading(error)


def broke_grading(error: GradingFailed) -> Grade:
    """Returns reward 0 for a submission that broke its own grading, with the error as detail."""
    detail = f"{BROKE_GRADING}: {error}"[:4000]
    if isinstance(error, TestsUnended):
        return replace(error.grade, verdict=error.grade.verdict.model_copy(update={"detail": detail}))
    return Grade(Verdict(reward=0.0, counts=True, detail=detail), report=str(error).encode())


def _changed_anything(progress: AttemptProgress) -> bool:
    """Whether the submission could have broken the grading. In the agent's own container this is always possible."""
    submitted = (progress.patch or b"").strip() or progress.handed_over
    return bool(submitted) or not progress.grader.fresh_environment


def _grades_gold_cleanly(progress: AttemptProgress, *, control: bool, quiet_s: float | None = None) -> bool:
    """Whether the task's gold solution, or its untouched state, is graded without error on the same image."""
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
    """Like `_grades_gold_cleanly`, for a gold solution whose artifacts are graded in the verifier's environment."""
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
    """Returns a key that is equal for failures of the same kind: the error type and what was expected.

    The text after "found" is left out: the submission may control it and could change it each time.
    """
    if isinstance(error, TestsUnended):  # the submission can also choose between a hang and a killed shell
        return type(error).__name__, ""
    return type(error).__name__, re.sub(r"\d+", "#", str(error).partition("found")[0])[:80]
