"""Computes due times of schedules, in UTC, from cron expressions."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum

from cronsim import CronSim, CronSimError

from app.errors import OptionInvalid

_MOST = 1000
"""Due times handled at once: enough for a schedule of every minute after 16 hours without a beat."""


class Misfire(StrEnum):
    """Policies for due times that passed while no beat ran."""

    SKIP = "skip"  # fire only due times of the last `grace_s`
    ONCE = "once"  # fire the latest missed due time, skip the others


def check_cron(cron: str, now: datetime) -> datetime:
    """Returns the next due time. Raises: OptionInvalid: not five cron fields, or never due."""
    try:
        return next(CronSim(cron, now))
    except StopIteration:
        raise OptionInvalid(f"cron {cron!r} never fires; expected a date that exists, e.g. '0 3 * * *'") from None
    except CronSimError as error:
        raise OptionInvalid(f"bad cron {cron!r}: {error}; expected five fields, e.g. '0 3 * * *' (UTC)") from None


def due_times(cron: str, after: datetime, until: datetime) -> list[datetime]:
    """Returns the due times in (after, until], oldest first."""
    times: list[datetime] = []
    for due_at in CronSim(cron, after):
        if due_at > until or len(times) >= _MOST:
            break
        times.append(due_at)
    return times


def to_fire(due: Sequence[datetime], misfire: Misfire, now: datetime, grace_s: float) -> list[datetime]:
    """Returns the due times to fire now. A due time at most `grace_s` late is on time under both policies."""
    on_time = [due_at for due_at in due if (now - due_at).total_seconds() <= grace_s]
    if on_time or misfire is Misfire.SKIP:
        return on_time
    return list(due[-1:])
