"""Producers wait for the ends of many tasks."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import pytest

from app.client import MegaFlow, as_completed
from app.errors import WaitTimeout
from app.ledger import results
from app.ledger.database import Database
from app.settings import Settings
from tests.building import a_task


@pytest.fixture
def flow(settings: Settings, database: Database) -> Iterator[MegaFlow]:
    with MegaFlow(settings, database=database) as found:
        yield found


def test_waiting_for_many_tasks_reads_them_a_few_times_and_not_once_for_each_end(
    flow: MegaFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = flow.enqueue_many([a_task(f"t{number}") for number in range(30)], agent="nop")
    read: list[int] = []
    ended = results.ended

    def counted(database: Database, task_ids: list[UUID]) -> list[UUID]:
        read.append(len(task_ids))
        return ended(database, task_ids)

    monkeypatch.setattr(results, "ended", counted)
    first, *rest = run.handles
    first.cancel()
    found = [first.task_id]
    for handle in as_completed(run.handles, 30):
        assert handle.task_id == found.pop(0), "in the order in which they end"
        if rest:
            found.append(rest[0].task_id)
            rest.pop(0).cancel()
    assert not found
    assert sum(read) < 30 * 5


def test_a_wait_that_takes_too_long_says_how_many_go_on_and_leaves_nothing_behind(flow: MegaFlow) -> None:
    run = flow.enqueue_many([a_task("a"), a_task("b")], agent="nop")
    run.handles[0].cancel()
    ends = as_completed(run.handles, 0.3)
    assert next(ends).task_id == run.handles[0].task_id
    with pytest.raises(WaitTimeout, match="1 tasks had not ended"):
        next(ends)
    half = as_completed(run.handles)
    next(half)
    half.close()
    run.cancel()
    assert len(run.results(timeout=20)) == 2
