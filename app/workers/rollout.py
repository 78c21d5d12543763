"""The spine: carries one attempt from its claim to a recorded outcome. Reads top to bottom like the way of a task.

    claim -> image -> environment -> agent -> patch -> grading -> artifacts -> outcome -> teardown

Every station does its own work and knows no other. A bad rollout is data; only what could not be measured is a failure,
and `app.models.endings` says which is which.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import structlog

from app.agents.base import Agent, AgentJob, AgentReport
from app.agents.catalogue import traits
from app.agents.external import known_agents
from app.agents.patch import head_commit, take_patch
from app.agents.reconcile import reconciled, would_end_the_same
from app.agents.recorded import recorded_run
from app.environments.contract import Environment
from app.environments.networks import MODEL_PORT, model_outlet
from app.errors import AgentFailed, EnvironmentOverLimit, MegaFlowError, ModelRefused, StaleWriter
from app.grading.base import Grade, Submission
from app.ledger import attempts, ends, results
from app.ledger.attempts import Claim
from app.ledger.results import StoredTrajectory
from app.models.endings import BLAME, PERMANENT, PERMANENT_WHEN_REPEATED, Blame, EndReason, reason_of
from app.models.model_calls import Account
from app.models.outcome import Artifact, ArtifactKind, Failure, Phase, Verdict
from app.models.spec import EnvironmentKind, Network, Reuse, ScriptGoal, ScriptSolution, TestsGoal
from app.workers.environment_hold import environment_for
from app.workers.lease import StopToken
from app.workers.model_access import model_access
from app.workers.patience import patient
from app.workers.stations import Stations
from app.workers.under_way import Rollout

log = structlog.get_logger()


def carry_out(claimed: Claim, stations: Stations, token: StopToken) -> EndReason:
    """Do the attempt and record what came of it; raises nothing that is the attempt's own."""
    bound = structlog.contextvars.bound_contextvars(
        task=claimed.spec.task.name, attempt_id=str(claimed.attempt_id), number=claimed.number
    )
    with bound, _scratch(stations, claimed) as scratch:
        rollout = Rollout(claimed, stations, token, scratch)
        with rollout.open:  # the last environment is given back only when the outcome is on record
            try:
                reason = _walk(rollout)
            except StaleWriter as error:
                log.warning("attempt.stale", error=str(error))
                reason = EndReason.LOST
            except Exception as error:  # noqa: BLE001  the one home: every fault becomes a record
                reason = _record_failure(rollout, error)
        _record_teardown(rollout)
    log.info("attempt.ended", end_reason=reason.value)
    return reason


def _walk(rollout: Rollout) -> EndReason:
    grade = _act_and_grade(rollout)
    report = rollout.report
    assert report is not None
    artifacts = _store(rollout)
    rollout.passed(Phase.STORED)
    rollout.write(ends.finish, end_reason=report.end_reason, verdict=grade.verdict, artifacts=artifacts)
    _forget_calls(rollout, artifacts)
    return report.end_reason


def _act_and_grade(rollout: Rollout) -> Grade:
    grader = rollout.stations.grader(rollout.claimed.spec.task.goal)
    agent = rollout.stations.agent(rollout.claimed.spec.agent)
    agent.check()  # before there is an environment: what acts inside has to be mounted there
    rollout.heed()  # an installation takes minutes
    with ExitStack() as agents_own:
        # Graded where the agent was, it stays open as long as the attempt; else it goes before the grading begins.
        holder = agents_own if grader.fresh_environment else rollout.open
        environment = holder.enter_context(environment_for(rollout, "agent"))
        rollout.passed(Phase.ENVIRONMENT_READY, **environment.describe() | rollout.torn["agent"])
        base = head_commit(environment, rollout.claimed.spec.task.environment.workdir)
        agents_own.callback(_chronicle, rollout, environment)
        try:
            _run_agent(rollout, agent, environment)
            _assure(environment)
            patch = _take_patch(rollout, environment, base)
            if not grader.fresh_environment:
                return _grade(rollout, environment, patch)
        except (AgentFailed, EnvironmentOverLimit) as error:  # its own doing, and nothing is left that could be graded
            return _judged(rollout, Verdict(reward=0.0, counts=True, detail=str(error)))
    return _grade(rollout, rollout.open.enter_context(environment_for(rollout, "grading")), patch)


def _chronicle(rollout: Rollout, environment: Environment) -> None:
    """Keep as evidence what else happened in the agent's environment, while it is still there."""
    logs = environment.logs()
    rollout.evidence.environment(logs, environment.describe().get("outlet"))


# --- Agent ----------------------------------------------------------------------------------------------------------


def _run_agent(rollout: Rollout, agent: Agent, environment: Environment) -> None:
    """Raises: Stopped; AgentNotMeasured, ModelRefused: the agent's end is not a result."""
    stations, claimed = rollout.stations, rollout.claimed
    with ExitStack() as access:
        if agent.needs_model:
            opened = model_access(stations.settings, stations.database, claimed, rollout.token.is_set)
            rollout.model = access.enter_context(opened)
        rollout.passed(Phase.AGENT_STARTED)
        try:
            report = _report_of(rollout, agent, environment)
        except Exception:
            _account_for_what_was_done(rollout, agent)
            raise
        rollout.evidence.of_agent(report)
        account = _settled(rollout, agent)
        report = reconciled(report, account, doubt=rollout.model.doubt if rollout.model else "")
    rollout.report = report
    ended = {"agent_end": report.end_reason.value, "steps": report.steps, "usage": report.usage}
    rollout.passed(Phase.AGENT_ENDED, **ended, **rollout.limits_met.look())
    if would_end_the_same(report, account):
        raise ModelRefused(report.detail)
    if BLAME[report.end_reason] is not Blame.RESULT:
        raise AgentNotMeasured(report)


def _settled(rollout: Rollout, agent: Agent) -> Account | None:
    """What the agent has had of its model, all on record and kept as evidence. Raises: DatabaseUnavailable."""
    model = rollout.model
    if model is None:
        return None
    account = model.settle()
    rollout.evidence.of_model(rollout.claimed, agent.version, model.calls, account, redact=[model.token])
    return account


def _account_for_what_was_done(rollout: Rollout, agent: Agent) -> None:
    """After an error that left no report: its calls were made and cost money all the same. Raises nothing."""
    try:
        rollout.evidence.of_agent(_left_behind(rollout, AgentReport(EndReason.INFRASTRUCTURE)))
        account = _settled(rollout, agent)
        if account is not None:
            usage = account.describe()
            ended = {"environment": {"usage": usage}, "cost_usd": usage.get("cost_usd")}
            rollout.write(attempts.record_phase, Phase.AGENT_ENDED, **ended)
    except Exception:  # the error that ended the agent is the one to be told
        log.exception("attempt.agent_unaccounted")


def _left_behind(rollout: Rollout, report: AgentReport) -> AgentReport:
    """The report with the log and the files that an agent which could not tell has left where all leave theirs."""
    log_file, home = rollout.scratch / "agent.log", rollout.scratch / "home"
    return replace(
        report,
        log=log_file if log_file.is_file() else None,
        files=home if home.is_dir() and any(home.iterdir()) else None,
    )


def _report_of(rollout: Rollout, agent: Agent, environment: Environment) -> AgentReport:
    """What the agent did, or why it could not."""
    spec, stations, model = rollout.claimed.spec, rollout.stations, rollout.model
    solution = spec.task.solution if agent.needs_solution else None
    recorded = _recorded(rollout) if traits(spec.agent, known_agents(stations.settings)).needs_recording else None
    try:
        with _model_inside(rollout, environment) as inside:
            job = AgentJob(
                task_name=spec.task.name,
                description=spec.task.description,
                workdir=spec.task.environment.workdir,
                limits=spec.task.limits,
                arguments=spec.agent_args,
                model=model.endpoint if model else None,
                model_inside_url=inside,
                tools_inside=stations.tools_inside(spec.task.environment),
                waited_s=model.waited_s if model else lambda: 0.0,
                solution=solution,
                solution_files=stations.bundle(solution.files) if isinstance(solution, ScriptSolution) else None,
                recording=stations.store.get(recorded.key) if recorded else None,
                recorded_end=recorded.end_reason if recorded else None,
                scratch=rollout.scratch,
                logs=rollout.logs,
            )
            return agent.run(job, environment, rollout.token)
    except AgentFailed as error:
        return _left_behind(rollout, AgentReport(EndReason.AGENT_ERROR, detail=str(error)))
    except EnvironmentOverLimit as error:
        return _left_behind(rollout, AgentReport(EndReason.RESOURCE_LIMIT, detail=str(error)))


def _recorded(rollout: Rollout) -> StoredTrajectory:
    """What the agent is to do again. Raises: UnknownName, SpecInvalid."""
    claimed = rollout.claimed
    run = recorded_run(claimed.spec.model.name if claimed.spec.model else "")
    return results.trajectory_of(rollout.stations.database, run, claimed.task_id, claimed.spec.task.name)


@contextmanager
def _model_inside(rollout: Rollout, environment: Environment) -> Iterator[str | None]:
    """For the block, where commands inside reach the model: by a port of theirs, if the task or its agent asks for it.

    Raises: EnvironmentFailed.
    """
    asked = rollout.claimed.spec.task.environment
    if rollout.model is None or not (asked.network is Network.MODEL_ONLY or asked.tools):
        yield None
        return
    shared = asked.kind is EnvironmentKind.LOCAL or asked.reuse is Reuse.SHARED_READONLY  # with others' loopback
    url, outlet = model_outlet(environment.forward, rollout.model.endpoint.base_url, port=0 if shared else MODEL_PORT)
    try:
        yield url
    finally:
        outlet.close()
        rollout.torn["model_outlet"] = outlet.describe()


class AgentNotMeasured(MegaFlowError):
    """The agent ended for a reason that is not its own: nothing to grade."""

    def __init__(self, report: AgentReport) -> None:
        super().__init__(report.detail or f"the agent ended with {report.end_reason.value}")
        self.reason = report.end_reason


def _take_patch(rollout: Rollout, environment: Environment, base: str | None) -> bytes | None:
    """What the agent changed since it began; an unusable patch is its own fault only where the patch is what counts.

    Raises: AgentFailed.
    """
    task = rollout.claimed.spec.task
    try:
        patch = take_patch(environment, task.environment.workdir, base)
    except AgentFailed as error:
        if isinstance(task.goal, TestsGoal):
            raise
        rollout.evidence.patch(None, why=str(error))
        return None
    rollout.evidence.patch(patch)
    return patch


# --- Grading and artifacts ------------------------------------------------------------------------------------------


def _grade(rollout: Rollout, environment: Environment, patch: bytes | None) -> Grade:
    task = rollout.claimed.spec.task
    tests = rollout.stations.bundle(task.goal.tests) if isinstance(task.goal, ScriptGoal) else None
    rollout.limits_met.look()  # until now it was the agent's
    rollout.limits_met.stage = "grading"
    grade = rollout.stations.grader(task.goal).grade(Submission(task, patch, tests), environment)
    _assure(environment)
    rollout.evidence.grade(grade)
    rollout.passed(Phase.GRADED, **rollout.limits_met.look())
    return grade


def _assure(environment: Environment) -> None:
    """Refuse what agent or grader did while a service could not be reached for our sake: it says nothing of the task.

    Raises: EngineUnavailable, EnvironmentFailed.
    """
    environment.assure()


def _judged(rollout: Rollout, verdict: Verdict) -> Grade:
    """A verdict that needs no grader."""
    grade = Grade(verdict, report=verdict.detail.encode())
    rollout.evidence.grade(grade)
    rollout.passed(Phase.GRADED, **rollout.limits_met.look())
    return grade


def _store(rollout: Rollout) -> list[Artifact]:
    claimed = rollout.claimed
    prefix = f"runs/{claimed.run_id}/{claimed.task_id}/{claimed.number}"
    secrets = [rollout.model.token] if rollout.model else []
    return rollout.evidence.store(rollout.stations.store, prefix, redact=secrets)


def _forget_calls(rollout: Rollout, artifacts: Sequence[Artifact]) -> None:
    """Once the outcome is on record with its artifacts, let the ledger forget what they hold. Raises nothing."""
    if rollout.model is None or not any(one.kind is ArtifactKind.MODEL_CALLS and one.key for one in artifacts):
        return
    try:
        rollout.model.forget()
    except Exception:  # the outcome stands; what stays takes room and does no harm
        log.exception("attempt.calls_not_forgotten")


# --- Ends -----------------------------------------------------------------------------------------------------------


def _record_failure(rollout: Rollout, error: Exception) -> EndReason:
    reason = rollout.token.reason or getattr(error, "reason", None) or reason_of(error)
    if not isinstance(error, MegaFlowError):
        log.exception("attempt.unexpected_error")
    failure = Failure(error=type(error).__name__, message=str(error)[:4000], phase=rollout.last_phase)
    try:
        artifacts = _store(rollout)
    except MegaFlowError as unstored:
        artifacts = [Artifact(kind=kind, missing=f"not stored: {unstored}") for kind in ArtifactKind]
    try:
        rollout.write(
            ends.fail,
            end_reason=reason,
            failure=failure,
            artifacts=artifacts,
            permanent=_permanent(rollout, error),
            retry=rollout.stations.retry,
            waits=rollout.gate.waited,
        )
    except StaleWriter as stale:
        log.warning("attempt.stale", error=str(stale))
        return EndReason.LOST
    _forget_calls(rollout, artifacts)
    return reason


def _permanent(rollout: Rollout, error: Exception) -> bool:
    """Whether another attempt would end the same. Raises: DatabaseUnavailable."""
    if isinstance(error, PERMANENT_WHEN_REPEATED):
        patiently = patient(rollout.stations.settings.lease_s)
        return patiently(attempts.failed_before, rollout.stations.database, rollout.claimed, type(error).__name__)
    return isinstance(error, PERMANENT)


def _record_teardown(rollout: Rollout) -> None:
    rollout.write(ends.record_teardown, {"teardown": rollout.torn, **rollout.limits_met.look()})


@contextmanager
def _scratch(stations: Stations, claimed: Claim) -> Iterator[Path]:
    folder = stations.scratch(claimed.instance_id, claimed.attempt_id)
    try:
        yield folder
    finally:
        with suppress(OSError):
            shutil.rmtree(folder)
            folder.parent.rmdir()  # unless another attempt of this instance has one, too
