"""Holds the context of this worker process: its instance or the control role, set once at the start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from uuid import UUID

import structlog

from app.errors import DatabaseUnavailable, StackNotRunning
from app.ledger import admission, attempts, gradings, instances
from app.ledger.attempts import Claim
from app.models.endings import EndReason
from app.models.outcome import WakeUpMessage
from app.models.states import InstanceState
from app.workers import grader
from app.workers.attempt import carry_out
from app.workers.lease import LeaseRenewer, StopToken
from app.workers.retry import retrying
from app.workers.services import WorkerServices

log = structlog.get_logger()


class WorkerContext:
    """Worker of one instance: executes the attempts named by messages."""

    def __init__(self, instance_id: UUID, services: WorkerServices, renewer: LeaseRenewer) -> None:
        self.instance_id = instance_id
        self.services = services
        self.renewer = renewer
        self.shutting_down = threading.Event()
        self._claiming = threading.Lock()

    def take(self, message: WakeUpMessage) -> str:
        """Claims the attempt in the message, else any attempt waiting for this kind of instance, and executes it."""
        if self.shutting_down.is_set() or self.renewer.draining.is_set():
            admission.give_back(self.services.database, message)
            return "given back"
        # One claim at a time: after a claim with an error, `_claim_again` looks for held claims that do not run yet.
        with self._claiming:
            claimed = self._claim(message)
            if claimed is None:
                return self._not_claimed(message)
            token = self.renewer.take(claimed)
        return self._in_hand(claimed, token, lambda: carry_out(claimed, self.services, token).value)

    def grade(self, message: WakeUpMessage) -> str:
        """Claims the grading in the message and executes it."""
        database, lease_s = self.services.database, self.services.settings.lease_s
        if self.shutting_down.is_set() or self.renewer.draining.is_set():
            gradings.give_back(database, message)
            return "given back"
        with self._claiming:
            if self.renewer.in_hand(message.attempt_id):
                return "stale"
            claim = retrying(lease_s)(gradings.claim, database, message, self.instance_id, lease_s=lease_s)
            if claim is None:
                return "stale"
            token = self.renewer.take(claim.claimed)
        return self._in_hand(claim.claimed, token, lambda: grader.carry_out(claim, self.services, token))

    def _in_hand(self, claimed: Claim, token: StopToken, work: Callable[[], str]) -> str:
        try:
            if self.shutting_down.is_set():
                token.stop(EndReason.INTERRUPTED)
            return work()
        finally:
            self.renewer.drop(claimed)

    def _not_claimed(self, message: WakeUpMessage) -> str:
        """Gives the message back if this instance is draining (perhaps not noticed yet), else treats it as stale."""
        if instances.seen(self.services.database, self.instance_id) is not InstanceState.DRAINING:
            return "stale"
        self.renewer.draining.set()
        admission.give_back(self.services.database, message)
        return "given back"

    def _claim(self, message: WakeUpMessage) -> Claim | None:
        """Claims an attempt. Finds a claim that was applied despite a database error: its lease need not lapse."""
        lease_s, database = self.services.settings.lease_s, self.services.database
        try:
            return attempts.claim(database, message, self.instance_id, lease_s=lease_s) or attempts.claim_any(
                database, self.instance_id, lease_s=lease_s
            )
        except DatabaseUnavailable as error:
            log.warning("worker.claim_unclear", error=str(error))
        return retrying(lease_s)(self._claim_again, message)

    def _claim_again(self, message: WakeUpMessage) -> Claim | None:
        lease_s, database = self.services.settings.lease_s, self.services.database
        for claimed in attempts.held_by(database, self.instance_id):
            if not self.renewer.in_hand(claimed.attempt_id):
                return claimed
        return attempts.claim(database, message, self.instance_id, lease_s=lease_s)

    def interrupt(self) -> None:
        """Stops all attempts: they end as interrupted and do not use up a retry."""
        self.shutting_down.set()
        self.renewer.stop_all(EndReason.INTERRUPTED)


class _Current:
    seat: WorkerContext | None = None
    tick: Callable[[datetime], int] | None = None


def sit(seat: WorkerContext) -> None:
    """Sets this process's instance."""
    _Current.seat = seat


def serve_ticks(tick: Callable[[datetime], int]) -> None:
    """Makes this process a control worker. tick: called at each tick of Celery beat."""
    _Current.tick = tick


def current() -> WorkerContext:
    """Raises: StackNotRunning: a plain Celery worker consumes the queue of instances."""
    if _Current.seat is None:
        raise StackNotRunning("this worker is no instance; expected one started by a provider or `megaflow worker`")
    return _Current.seat


def tick() -> int:
    """Raises: StackNotRunning: not a control worker."""
    if _Current.tick is None:
        raise StackNotRunning("this worker serves no schedules; expected the control worker")
    return _Current.tick(datetime.now(UTC))
