"""Runs one attempt from its claim to its recorded outcome, phase by phase.

    provision -> open_model -> act -> end_agent -> extract_patch -> grade -> store -> record
                                                                 -> hand_over

Each function takes the frozen progress of the attempt. It returns a changed copy; the last one, `record` or
`hand_over`, returns the end reason. A task whose grading needs a separate environment is handed over to a grader
(`app.workers.grader`). A bad result of an agent is data. Only an attempt that could not be scored is a failure;
`app.models.endings` decides between the two.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from app.agents.base import AgentJob, AgentReport
from app.agents.catalogue import traits
from app.agents.external import known_agents
from app.agents.patch import StepDiffs, head_commit, take_patch
from app.agents.reconcile import reconciled, would_end_the_same
from app.agents.replay import recorded_run
from app.environments.contract import Environment
from app.environments.networks import MODEL_PORT, open_model_egress
from app.errors import AgentFailed, EnvironmentOverLimit, MegaFlowError, ModelRefused, StaleWriter
from app.ledger import attempts, ends, gradings, results
from app.ledger.attempts import Claim
from app.ledger.results import StoredTrajectory
from app.models.endings import BLAME, PERMANENT, PERMANENT_WHEN_REPEATED, Blame, EndReason, reason_of
from app.models.model_calls import Account
from app.models.outcome import AgentResult, Artifact, ArtifactKind, Failure, Phase
from app.models.spec import EnvironmentKind, Network, Reuse, ScriptSolution, TestsGoal
from app.workers import grading
from app.workers.attempt_context import AttemptContext, AttemptProgress
from app.workers.environments import environment_for, live_shells, put_inputs
from app.workers.lease import StopToken
from app.workers.model_access import ModelAccess, model_access
from app.workers.retry import retrying
from app.workers.services import WorkerServices

log = structlog.get_logger()


def carry_out(claimed: Claim, services: WorkerServices, token: StopToken) -> EndReason:
    """Executes the attempt and records its outcome. Errors of the attempt are recorded, not raised."""
    bound = structlog.contextvars.bound_contextvars(
        task=claimed.spec.task.name, attempt_id=str(claimed.attempt_id), number=claimed.number
    )
    with bound, scratch_folder(services, claimed) as scratch:
        context = AttemptContext.of(claimed, services, token, scratch)
        with context.open:  # the last environment is released only after the outcome is recorded
            run = _AttemptRun(context)
            try:
                reason = run.run()
            except StaleWriter as error:
                log.warning("attempt.stale", error=str(error))
                reason = EndReason.LOST
            except Exception as error:  # noqa: BLE001  the only catch-all: every fault becomes a record
                reason = _record_failure(context, run.model, error)
        record_teardown(context)
    log.info("attempt.ended", end_reason=reason.value)
    return reason


class _AttemptRun:
    def __init__(self, context: AttemptContext) -> None:
        self._context = context
        self._progress: AttemptProgress | None = None

    @property
    def model(self) -> ModelAccess | None:
        return self._progress.model if self._progress else None

    def run(self) -> EndReason:
        context = self._context
        agent = context.services.agent(context.claimed.spec.agent)
        grader = context.services.grader(context.claimed.spec.task.goal)
        agent.check()  # before the environment is created: tools that run inside are mounted into it
        context.raise_if_stopped()  # an installation takes minutes
        with ExitStack() as agent_scope:
            self._progress = progress = provision(AttemptProgress(context, grader, agent_scope, agent))
            try:
                with ExitStack() as access:  # no access to the model after the agent has ended
                    self._progress = progress = open_model(progress, access)
                    access.enter_context(live_shells(context, progress.the_environment))
                    self._progress = progress = act(progress)
                self._progress = progress = grading.collect(extract_patch(end_agent(progress)))
                if not grader.fresh_environment:
                    self._progress = progress = grading.grade(progress)
            except (AgentFailed, EnvironmentOverLimit) as error:  # the agent's own fault; there is nothing to grade
                self._progress = progress = grading.judge(progress, str(error))
        return hand_over(progress) if progress.grade is None else record(store(progress))


def provision(progress: AttemptProgress) -> AttemptProgress:
    """Gets the agent's environment and writes the files of earlier tasks into it.

    Raises: Stopped; EnvironmentFailed; ImageUnavailable; all errors of `create` and `put_inputs`.
    """
    context = progress.context
    # If grading uses this environment, it stays open until the attempt ends; else it closes before grading begins.
    holder = progress.agent_scope if progress.grader.fresh_environment else context.open
    environment = holder.enter_context(environment_for(context, "agent"))
    resources = context.claimed.spec.task.environment.resources
    sizes = {"cpus": resources.cpus, "memory_bytes": resources.memory_bytes, "kill_at": resources.most.model_dump()}
    described = environment.describe() | context.teardown["agent"] | {"resources": sizes}
    context.record_phase(Phase.ENVIRONMENT_READY, **described)
    base_commit = head_commit(context.recorded(environment, "patch"), context.claimed.spec.task.environment.workdir)
    progress.agent_scope.callback(_keep_service_logs, context, environment)
    put_inputs(context, environment)
    return replace(progress, environment=environment, base_commit=base_commit)


def _keep_service_logs(context: AttemptContext, environment: Environment) -> None:
    context.evidence.environment(environment.logs(), environment.describe().get("egress"))


def open_model(progress: AttemptProgress, access: ExitStack) -> AttemptProgress:
    """Gives the agent a model token, if it needs one; the token ends with `access`. Raises: DatabaseUnavailable."""
    if not progress.the_agent.needs_model:
        return progress
    context = progress.context
    opened = model_access(context.services.settings, context.services.database, context.claimed, context.token.is_set)
    return replace(progress, model=access.enter_context(opened))


def act(progress: AttemptProgress) -> AttemptProgress:
    """Runs the agent; corrects its report by the account of its model calls. Raises: Stopped; the agent's errors."""
    context = progress.context
    context.record_phase(Phase.AGENT_STARTED, agent_version=progress.the_agent.version)
    try:
        report = _report_of(progress)
    except Exception:
        _account_for_what_was_done(progress)
        raise
    context.evidence.of_agent(report)
    account = _settled(progress)
    report = reconciled(report, account, doubt=progress.model.doubt if progress.model else "")
    return replace(progress, report=report, account=account)


def end_agent(progress: AttemptProgress) -> AttemptProgress:
    """Records the agent's end. Raises: Stopped; no result: HostOutOfMemory, AgentNotScored, ModelRefused."""
    context, report = progress.context, progress.the_report
    ended: dict[str, Any] = {"agent_end": report.end_reason.value, "steps": report.steps, "usage": report.usage}
    if context.journal.shells:
        ended["shells"] = context.journal.shells
    context.record_phase(Phase.AGENT_ENDED, **ended, **context.limits_met.look())
    context.limits_met.refuse_host_kills()
    if would_end_the_same(report, progress.account):
        raise ModelRefused(report.detail)
    if BLAME[report.end_reason] is not Blame.RESULT:
        raise AgentNotScored(report)
    progress.the_environment.assure()
    return progress


def _settled(progress: AttemptProgress) -> Account | None:
    """Returns the final account of the model calls; adds the calls to the evidence. Raises: DatabaseUnavailable."""
    context, model = progress.context, progress.model
    if model is None:
        return None
    account = model.settle()
    context.evidence.of_model(context.claimed, progress.the_agent.version, model.calls, account, redact=[model.token])
    return account


def _account_for_what_was_done(progress: AttemptProgress) -> None:
    """Records the agent's log, files, model calls and cost after an error that left no report. Raises nothing."""
    context = progress.context
    try:
        context.evidence.of_agent(_left_behind(context, AgentReport(EndReason.INFRASTRUCTURE)))
        account = _settled(progress)
        if account is not None:
            usage = account.describe()
            ended = {"environment": {"usage": usage}, "cost_usd": usage.get("cost_usd")}
            context.write(attempts.record_phase, Phase.AGENT_ENDED, **ended)
    except Exception:  # the error that ended the agent must be reported, not this one
        log.exception("attempt.agent_unaccounted")


def _left_behind(context: AttemptContext, report: AgentReport) -> AgentReport:
    """Adds to the report the log and the files that the agent left in the usual places of the scratch folder."""
    log_file, home = context.scratch / "agent.log", context.scratch / "home"
    return replace(
        report,
        log=log_file if log_file.is_file() else None,
        files=home if home.is_dir() and any(home.iterdir()) else None,
    )


def _report_of(progress: AttemptProgress) -> AgentReport:
    context, agent, model = progress.context, progress.the_agent, progress.model
    spec, services = context.claimed.spec, context.services
    solution = spec.task.solution if agent.needs_solution else None
    recorded = _recorded(context) if traits(spec.agent, known_agents(services.settings)).needs_recording else None
    try:
        with _model_inside(progress) as inside, _step_diffs(progress) as after:
            job = AgentJob(
                task_name=spec.task.name,
                description=spec.task.description,
                workdir=spec.task.environment.workdir,
                limits=spec.task.limits,
                arguments=spec.agent_args,
                model=model.endpoint if model else None,
                model_inside_url=inside,
                tools_inside=services.tools_inside(spec.task.environment),
                waited_s=model.waited_s if model else lambda: 0.0,
                solution=solution,
                solution_files=services.bundle(solution.files) if isinstance(solution, ScriptSolution) else None,
                recording=services.store.get(recorded.key) if recorded else None,
                recorded_end=recorded.end_reason if recorded else None,
                scratch=context.scratch,
                logs=context.logs,
            )
            return agent.run(job, context.recorded(progress.the_environment, "agent", after), context.token)
    except AgentFailed as error:
        return _left_behind(context, AgentReport(EndReason.AGENT_ERROR, detail=str(error)))
    except EnvironmentOverLimit as error:
        return _left_behind(context, AgentReport(EndReason.RESOURCE_LIMIT, detail=str(error)))


@contextmanager
def _step_diffs(progress: AttemptProgress) -> Iterator[Callable[[], None]]:
    """Yields a function to call after each command; it records a diff if the run has `record_diffs`."""
    context, spec = progress.context, progress.context.claimed.spec
    if not spec.record_diffs:
        yield lambda: None
        return
    diffs = StepDiffs(progress.the_environment, spec.task.environment.workdir, progress.base_commit)
    try:
        with diffs.recording():
            yield diffs.take
    finally:
        context.evidence.step_diffs(diffs.content())


def _recorded(context: AttemptContext) -> StoredTrajectory:
    claimed = context.claimed
    run = recorded_run(claimed.spec.model.name if claimed.spec.model else "")
    return results.trajectory_of(context.services.database, run, claimed.task_id, claimed.spec.task.name)


@contextmanager
def _model_inside(progress: AttemptProgress) -> Iterator[str | None]:
    """Yields the model's URL inside the environment (a local port); None if neither task nor agent needs it.

    Raises: EnvironmentFailed.
    """
    context, model = progress.context, progress.model
    spec = context.claimed.spec.task.environment
    if model is None or not (spec.network is Network.MODEL_ONLY or spec.tools):
        yield None
        return
    shared = spec.kind is EnvironmentKind.LOCAL or spec.reuse is Reuse.SHARED_READONLY  # the loopback is shared
    url, egress = open_model_egress(
        progress.the_environment.forward, model.endpoint.base_url, port=0 if shared else MODEL_PORT
    )
    try:
        yield url
    finally:
        egress.close()
        context.teardown["model_egress"] = egress.describe()


class AgentNotScored(MegaFlowError):
    """The agent ended for a reason that is not its fault: there is nothing to grade."""

    def __init__(self, report: AgentReport) -> None:
        super().__init__(report.detail or f"the agent ended with {report.end_reason.value}")
        self.reason = report.end_reason


def extract_patch(progress: AttemptProgress) -> AttemptProgress:
    """Extracts the patch: all changes since the agent began. An unusable patch is an error only if the goal is tests.

    Raises: AgentFailed.
    """
    context, task = progress.context, progress.context.claimed.spec.task
    try:
        shell = context.recorded(progress.the_environment, "patch")
        patch = take_patch(shell, task.environment.workdir, progress.base_commit)
    except AgentFailed as error:
        if isinstance(task.goal, TestsGoal):
            raise
        context.evidence.patch(None, why=str(error))
        return progress
    context.evidence.patch(patch)
    return replace(progress, patch=patch)


def store(progress: AttemptProgress) -> AttemptProgress:
    """Stores the evidence. Raises: Stopped; ArtifactStoreUnavailable."""
    artifacts = tuple(_stored(progress.context, progress.model))
    progress.context.record_phase(Phase.STORED)
    return replace(progress, artifacts=artifacts)


_AFTER_THE_AGENT = (ArtifactKind.TEST_REPORT, ArtifactKind.VERDICT)


def hand_over(progress: AttemptProgress) -> EndReason:
    """Stores the agent's artifacts, frees the slot, queues the grading. Returns the agent's end reason.

    Raises: Stopped; StaleWriter; ArtifactStoreUnavailable; DatabaseUnavailable.
    """
    context, report, model = progress.context, progress.the_report, progress.model
    artifacts = [one for one in _stored(context, model) if one.kind not in _AFTER_THE_AGENT]
    keys = {one.kind: one.key for one in artifacts}
    bundle, paths = grading.store_handed_over(progress, f"{_prefix(context)}/handed_over", _secrets(model))
    artifacts += [bundle] if bundle is not None else []
    result = AgentResult(
        end_reason=report.end_reason,
        patch=None if progress.patch is None else keys[ArtifactKind.PATCH],
        bundle=None if bundle is None else bundle.key,
        paths=paths,
        command_logs=keys[ArtifactKind.COMMAND_LOGS],
        command_log_count=len(context.logs),
        terminal=keys[ArtifactKind.TERMINAL],
    )
    context.raise_if_stopped()
    context.write(gradings.hand_over, result, artifacts=artifacts, waits=context.semaphore.waited)
    _forget_calls(model, artifacts)
    return report.end_reason


def record(progress: AttemptProgress) -> EndReason:
    """Records the outcome. Raises: StaleWriter; DatabaseUnavailable."""
    report, graded = progress.the_report, progress.grade
    assert graded is not None
    artifacts = list(progress.artifacts)
    progress.context.write(ends.finish, end_reason=report.end_reason, verdict=graded.verdict, artifacts=artifacts)
    _forget_calls(progress.model, artifacts)
    return report.end_reason


def _stored(context: AttemptContext, model: ModelAccess | None) -> list[Artifact]:
    return context.evidence.store(context.services.store, _prefix(context), redact=_secrets(model))


def _prefix(context: AttemptContext) -> str:
    claimed = context.claimed
    return f"runs/{claimed.run_id}/{claimed.task_id}/{claimed.number}"


def _secrets(model: ModelAccess | None) -> list[str]:
    return [model.token] if model else []


def _forget_calls(model: ModelAccess | None, artifacts: Sequence[Artifact]) -> None:
    """Deletes the messages of model calls from the ledger, if a stored artifact contains them. Raises nothing."""
    if model is None or not any(one.kind is ArtifactKind.MODEL_CALLS and one.key for one in artifacts):
        return
    try:
        model.forget()
    except Exception:  # the outcome is recorded; undeleted messages only use space
        log.exception("attempt.calls_not_forgotten")


def failure_of(context: AttemptContext, error: Exception) -> tuple[EndReason, Failure]:
    """Returns the end reason and the failure record for an error."""
    reason = context.token.reason or getattr(error, "reason", None) or reason_of(error)
    if not isinstance(error, MegaFlowError):
        log.exception("attempt.unexpected_error")
    return reason, Failure(error=type(error).__name__, message=str(error)[:4000], phase=context.journal.last_phase)


def _record_failure(context: AttemptContext, model: ModelAccess | None, error: Exception) -> EndReason:
    reason, failure = failure_of(context, error)
    return record_failed(context, model, reason, failure, permanent=is_permanent(context, error))


def record_failed(
    context: AttemptContext, model: ModelAccess | None, reason: EndReason, failure: Failure, *, permanent: bool
) -> EndReason:
    """Records the attempt as not scored, with the evidence available. Raises: DatabaseUnavailable."""
    try:
        artifacts = _stored(context, model)
    except Exception as unstored:  # noqa: BLE001 (after any error the end must be recorded)
        artifacts = [Artifact(kind=kind, missing=f"not stored: {unstored}") for kind in context.evidence.kinds]
    try:
        context.write(
            ends.fail,
            end_reason=reason,
            failure=failure,
            artifacts=artifacts,
            permanent=permanent,
            retry=context.services.retry,
            waits=context.semaphore.waited,
        )
    except StaleWriter as stale:
        log.warning("attempt.stale", error=str(stale))
        return EndReason.LOST
    _forget_calls(model, artifacts)
    return reason


def is_permanent(context: AttemptContext, error: Exception) -> bool:
    """Whether another attempt would end with the same error. Raises: DatabaseUnavailable."""
    if isinstance(error, PERMANENT_WHEN_REPEATED):
        retry = retrying(context.services.settings.lease_s)
        return retry(attempts.failed_before, context.services.database, context.claimed, type(error).__name__)
    return isinstance(error, PERMANENT)


def record_teardown(context: AttemptContext) -> None:
    """Records how the environments ended and their usage samples."""
    samples = {purpose: one.describe() for purpose, one in context.journal.samples.items() if one.rows}
    context.write(ends.record_teardown, {"teardown": context.teardown, **context.limits_met.look()}, samples)


@contextmanager
def scratch_folder(services: WorkerServices, claimed: Claim) -> Iterator[Path]:
    """Creates a private folder for the attempt on this host; deletes it after the block."""
    folder = services.scratch(claimed.instance_id, claimed.attempt_id)
    try:
        yield folder
    finally:
        with suppress(OSError):
            shutil.rmtree(folder)
            folder.parent.rmdir()  # fails, and is ignored, while another attempt of this instance uses it
