"""Executes a claimed grading: ends its attempt with the verdict, or puts the grading back for another grader.

A fault here costs a grading, not a rollout: the grading is put back, up to a maximum number of faults.
"""

from __future__ import annotations

from contextlib import ExitStack

import structlog

from app.agents.base import AgentReport
from app.errors import EnvironmentOverLimit, StaleWriter
from app.grading.base import HandedOver
from app.ledger import gradings
from app.ledger.gradings import GradingClaim
from app.models.endings import BLAME, Blame, EndReason
from app.models.outcome import ArtifactKind
from app.workers import attempt, grading
from app.workers.attempt_context import AttemptContext, AttemptProgress
from app.workers.lease import StopToken
from app.workers.services import WorkerServices

log = structlog.get_logger()

PUT_BACK = "put back"
"""Result instead of an end reason: another grader must do the grading."""
_KINDS = (ArtifactKind.TEST_REPORT, ArtifactKind.VERDICT)


def carry_out(claim: GradingClaim, services: WorkerServices, token: StopToken) -> str:
    """Grades and records the outcome. Returns an end reason or `PUT_BACK`. Errors of the attempt are not raised."""
    claimed = claim.claimed
    bound = structlog.contextvars.bound_contextvars(
        task=claimed.spec.task.name, attempt_id=str(claimed.attempt_id), number=claimed.number, grading=claimed.grading
    )
    with bound, attempt.scratch_folder(services, claimed) as scratch:
        context = AttemptContext.of_grading(claim, services, token, scratch)
        with context.open:
            try:
                ended = _grade(context, claim)
            except StaleWriter as error:
                log.warning("grading.stale", error=str(error))
                ended = EndReason.LOST.value
            except Exception as error:  # noqa: BLE001  the only catch-all: every fault becomes a record
                ended = _record_failure(context, error)
        attempt.record_teardown(context)
    log.info("grading.ended", end_reason=ended)
    return ended


def _grade(context: AttemptContext, claim: GradingClaim) -> str:
    services, result = context.services, claim.result
    progress = AttemptProgress(
        context,
        services.grader(context.claimed.spec.task.goal),
        ExitStack(),
        report=AgentReport(result.end_reason),
        patch=None if result.patch is None else services.store.get(result.patch),
        handed_over=HandedOver.split(services.store.get(result.bundle) if result.bundle else b"", result.paths),
    )
    context.raise_if_stopped()
    try:
        progress = grading.grade(progress)
    except EnvironmentOverLimit as error:
        # The submission exceeded a limit: a result, as if this happened in the agent's own environment.
        progress = grading.judge(progress, str(error))
    _choose_evidence(context)
    return attempt.record(attempt.store(progress)).value


def _choose_evidence(context: AttemptContext) -> None:
    """Selects the artifact kinds to store; logs and recording only if grading added some. The agent's are stored."""
    kinds = {ArtifactKind.COMMAND_LOGS: context.logs, ArtifactKind.TERMINAL: context.evidence.terminal}
    context.evidence.kinds = (*_KINDS, *(kind for kind, added in kinds.items() if added))


def _record_failure(context: AttemptContext, error: Exception) -> str:
    reason, failure = attempt.failure_of(context, error)
    is_fault = BLAME[reason] is Blame.INFRASTRUCTURE
    permanent = is_fault and attempt.is_permanent(context, error)
    try:
        if (is_fault and not permanent) or BLAME[reason] is Blame.INTERRUPTION:
            if context.write(gradings.put_back, failure if is_fault else None, context.services.retry):
                log.warning("grading.put_back", error=str(error)[:200])
                return PUT_BACK
            reason = reason if is_fault else EndReason.CANCELLED  # no fault, and not put back: the task is cancelled
    except StaleWriter as stale:
        log.warning("grading.stale", error=str(stale))
        return EndReason.LOST.value
    _choose_evidence(context)
    return attempt.record_failed(context, None, reason, failure, permanent=permanent).value
