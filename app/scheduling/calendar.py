"""Computes due times of schedules, in UTC, from cron expressions."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum

from cronsim import CronSim, CronSimError

from app.errors import OptionInvalid

_MOST = 1000
"""Due times looked at in one go: a minute's schedule after most of a day's stand-still."""


class Misfire(StrEnum):
    """What happens to due times that passed while no beat ran."""

    SKIP = "skip"  # only a due time of the last `grace_s` is fired
    ONCE = "once"  # the latest missed one is fired, the others are passed over


def check_cron(cron: str, now: datetime) -> datetime:
    """The next due time. Raises: SpecInvalid: not five cron fields, or never due."""
    try:
        return next(CronSim(cron, now))
    except StopIteration:
        raise OptionInvalid(f"cron {cron!r} never fires; expected a date that exists, e.g. '0 3 * * *'") from None
    except CronSimError as error:
        raise OptionInvalid(f"bad cron {cron!r}: {error}; expected five fields, e.g. '0 3 * * *' (UTC)") from None


def due_times(cron: str, after: datetime, until: datetime) -> list[datetime]:
    """Due times in (after, until], oldest first."""
    found: list[datetime] = []
    for due_at in CronSim(cron, after):
        if due_at > until or len(found) >= _MOST:
            break
        found.append(due_at)
    return found


def to_fire(due: Sequence[datetime], misfire: Misfire, now: datetime, grace_s: float) -> list[datetime]:
    """Which of the due times are fired now. One that is at most `grace_s` late is on time under either policy."""
    on_time = [due_at for due_at in due if (now - due_at).total_seconds() <= grace_s]
    if on_time or misfire is Misfire.SKIP:
        return on_time
    return list(due[-1:])
