"""Grades apart: carries out a claimed grading, ends its attempt with the verdict, or leaves it to another grader.

What breaks here costs a grading and no rollout: a fault puts it back, until there were too many.
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
"""Said instead of an end reason: another grader is to do it."""
_KINDS = (ArtifactKind.TEST_REPORT, ArtifactKind.VERDICT)


def carry_out(claim: GradingClaim, services: WorkerServices, token: StopToken) -> str:
    """Grade, and record what came of it: an end reason, or `PUT_BACK`; raises nothing that is the attempt's own."""
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
            except Exception as error:  # noqa: BLE001  the one home: every fault becomes a record
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
        # By what was submitted: a result, as where the agent's own environment ends so.
        progress = grading.judge(progress, str(error))
    _choose_evidence(context)
    return attempt.record(attempt.store(progress)).value


def _choose_evidence(context: AttemptContext) -> None:
    """What is stored here: the agent's is in the store; its logs and recording stay as they are when none are added."""
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
            reason = reason if is_fault else EndReason.CANCELLED  # else nothing would keep it from being put back
    except StaleWriter as stale:
        log.warning("grading.stale", error=str(stale))
        return EndReason.LOST.value
    _choose_evidence(context)
    return attempt.record_failed(context, None, reason, failure, permanent=permanent).value
