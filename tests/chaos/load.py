"""The load that most cases break something under: tasks of a second's work in both modes."""

from __future__ import annotations

from app.models.spec import Mode
from tests.chaos.fixture import Fixture
from tests.chaos.work import Work

A_SECOND = Work(seconds=1.0)


def submit_both(fixture: Fixture, count: int = 12, work: Work = A_SECOND) -> None:
    """`count` tasks in each mode, of which no two attempts may act at the same time."""
    fixture.submit(count, mode=Mode.EPHEMERAL, work=work, name="e", exclusive=True)
    fixture.submit(count, mode=Mode.PERSISTENT, work=work, name="p", exclusive=True)


def under_load(fixture: Fixture, count: int = 12, work: Work = A_SECOND) -> None:
    """Start everything and return when work is being done in earnest."""
    fixture.start()
    fixture.pool_ready()
    submit_both(fixture, count, work)
    fixture.acting(2)
