"""A task that begins with what another one left, in real containers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from app.models.spec import Mode
from tests.acceptance.conftest import System

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]


def test_a_task_gets_the_patch_of_the_one_before_it(system: System, task_folder: Callable[..., Path]) -> None:
    """The first takes a while, so that the second would be seen to begin early."""
    first = task_folder("first", solve="git init -q && sleep 2 && echo done > answer")
    second = task_folder("second", solve="cp /inputs/first.diff answer", test="grep -q +done answer && echo 1 >$OUT")
    flow = system.flow
    begun = flow.enqueue(system.task_of(first), agent="oracle", mode=Mode.EPHEMERAL)
    then = flow.enqueue(
        system.task_of(second),
        agent="oracle",
        mode=Mode.EPHEMERAL,
        inputs={"/inputs/first.diff": begun.artifact("patch")},
    )
    last = flow.enqueue(system.task_of(first), agent="oracle", mode=Mode.EPHEMERAL, after=[then])
    assert last.result(timeout=200).reward == 1.0
    assert then.result(timeout=0).reward == 1.0
    rows = system.rows(
        "SELECT t.finished_at, min(a.dispatched_at) AS begun FROM tasks t JOIN attempts a ON a.task_id = t.id"
        " WHERE t.id = ANY(:ids) GROUP BY t.id ORDER BY t.id",
        ids=[one.task_id for one in (begun, then, last)],
    )
    assert [row.begun > before.finished_at for before, row in pairwise(rows)] == [True, True]


def test_an_input_that_is_missing_ends_the_task_at_the_first(system: System, task_folder: Callable[..., Path]) -> None:
    task, flow = system.task_of(task_folder("no-repository")), system.flow
    begun = flow.enqueue(task, agent="oracle", mode=Mode.EPHEMERAL)
    then = flow.enqueue(task, agent="oracle", mode=Mode.EPHEMERAL, inputs={"/in/a": begun.artifact("patch")})
    last = flow.enqueue(task, agent="oracle", mode=Mode.EPHEMERAL, after=[then])
    ended = then.result(timeout=200)
    assert (ended.state, ended.end_reason, len(ended.attempts)) == ("failed", "invalid_spec", 1)
    failure = ended.attempts[0].failure
    assert failure is not None
    assert failure.error == "InputMissing"
    assert failure.message.startswith(
        f"input missing: patch of task no-repository ({begun.task_id}) for /in/a: the task"
    )
    assert last.result(timeout=60).state == "cancelled"
