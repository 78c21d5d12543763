"""The state machine as pure data."""

from __future__ import annotations

from enum import StrEnum

import pytest

from app.models.states import (
    ATTEMPT_MOVES,
    ENDED_TASK,
    INSTANCE_MOVES,
    LIVE_ATTEMPT,
    LIVE_INSTANCE,
    TASK_MOVES,
    AttemptState,
    InstanceState,
    TaskState,
)

MACHINES = [TASK_MOVES, ATTEMPT_MOVES, INSTANCE_MOVES]


@pytest.mark.parametrize("moves", MACHINES)
def test_every_state_says_where_it_may_go(moves: dict[StrEnum, frozenset[StrEnum]]) -> None:
    kinds = {type(state) for state in moves}
    assert len(kinds) == 1
    assert set(moves) == set(kinds.pop())


@pytest.mark.parametrize(
    ("moves", "ends"),
    [
        (TASK_MOVES, ENDED_TASK),
        (ATTEMPT_MOVES, frozenset(AttemptState) - LIVE_ATTEMPT),
        (INSTANCE_MOVES, frozenset(InstanceState) - LIVE_INSTANCE),
    ],
)
def test_from_every_state_an_end_can_be_reached(
    moves: dict[StrEnum, frozenset[StrEnum]], ends: frozenset[StrEnum]
) -> None:
    reaches_end = set(ends)
    for _ in moves:
        reaches_end |= {state for state, nexts in moves.items() if nexts & reaches_end}
    assert reaches_end == set(moves)


def test_an_attempt_never_comes_back_to_life() -> None:
    for state in set(AttemptState) - LIVE_ATTEMPT:
        assert ATTEMPT_MOVES[state] == frozenset()


def test_a_graded_task_stays_graded_and_an_unmeasured_one_may_be_reopened() -> None:
    assert TASK_MOVES[TaskState.SUCCEEDED] == frozenset()
    assert TaskState.PENDING in TASK_MOVES[TaskState.FAILED]
