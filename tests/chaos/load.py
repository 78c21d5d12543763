"""The load that most cases break something under: tasks of a second's work in both modes."""

from __future__ import annotations

from app.models.spec import Mode
from tests.chaos.ground import Ground
from tests.chaos.work import Work

A_SECOND = Work(seconds=1.0)


def submit_both(ground: Ground, count: int = 12, work: Work = A_SECOND) -> None:
    """`count` tasks in each mode, of which no two attempts may act at the same time."""
    ground.submit(count, mode=Mode.EPHEMERAL, work=work, name="e", exclusive=True)
    ground.submit(count, mode=Mode.PERSISTENT, work=work, name="p", exclusive=True)


def under_load(ground: Ground, count: int = 12, work: Work = A_SECOND) -> None:
    """Start everything and return when work is being done in earnest."""
    ground.start()
    ground.pool_ready()
    submit_both(ground, count, work)
    ground.acting(2)
