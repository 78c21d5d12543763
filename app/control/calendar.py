"""Starts scheduled evaluations when they are due; beat calls it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import structlog
from pydantic import ValidationError

from app.client import MegaFlow
from app.errors import DatabaseUnavailable, MegaFlowError
from app.evaluation import Submission
from app.ledger import schedules
from app.ledger.database import Database
from app.ledger.schedules import Schedule
from app.scheduling.calendar import Misfire, due_times, to_fire
from app.settings import Settings

log = structlog.get_logger()


class Calendar:
    """Submits the runs of due schedules. Several may tick at once: each due time is claimed by one of them."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings = settings
        self._database = database
        self._flow = MegaFlow(settings, database)

    def tick(self, now: datetime | None = None) -> int:
        """Fires the due times, and unfinished ones again. Returns how many, failed submissions included."""
        now = now or datetime.now(UTC)
        grace_s = self._settings.schedule_tick_s * 3
        fired = 0
        for schedule in schedules.all_of(self._database):
            after, due = schedule.settled_until.astimezone(UTC), list[datetime]()
            while times := due_times(schedule.cron, after, now):  # after a long pause the last batch counts
                after, due = times[-1], times
            if not due:
                continue
            chosen = to_fire(due, Misfire(schedule.misfire), now, grace_s)
            for due_at in schedules.claim_due(self._database, schedule, chosen, until=due[-1]):
                self._fire(schedule, due_at)
                fired += 1
        for schedule, due_at in schedules.unfinished(self._database, older_than_s=60.0):
            if now - due_at < timedelta(days=1):
                self._fire(schedule, due_at)
                fired += 1
        return fired

    def _fire(self, schedule: Schedule, due_at: datetime) -> None:
        """Submits the run, once even if called again: the due time is its idempotency key."""
        key = f"schedule:{schedule.id}:{due_at.isoformat()}"
        try:
            submission = Submission.model_validate({**schedule.submission, "dataset": schedule.dataset})
            run = self._flow.submit(submission, idempotency_key=key)
        except DatabaseUnavailable as error:  # not the schedule's fault: it is fired again
            log.warning("schedule.postponed", schedule=schedule.name, due_at=str(due_at), error=str(error))
            return
        except (MegaFlowError, ValidationError) as error:  # also a submission that another release stored
            log.warning("schedule.failed", schedule=schedule.name, due_at=str(due_at), error=str(error))
            schedules.note(self._database, schedule.id, due_at, run_id=None, failure=str(error))
            return
        log.info("schedule.fired", schedule=schedule.name, due_at=str(due_at), run_id=str(run.id))
        schedules.note(self._database, schedule.id, due_at, run_id=run.id)
