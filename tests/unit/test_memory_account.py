"""Whom the kernel killed for memory, stage by stage, and what a person is shown of it."""

from __future__ import annotations

from typing import cast
from uuid import uuid4

from app.cli.show import memory_lines
from app.environments.base import Environment
from app.models.outcome import AttemptRecord
from app.models.spec import Mode
from app.models.states import AttemptState
from app.workers.memory_account import MemoryAccount


class Counting:
    """An environment by its count of kills."""

    def __init__(self, kills: int | None) -> None:
        self.kills = kills

    def memory_kills(self) -> int | None:
        return self.kills


def watched(account: MemoryAccount, kills: int | None) -> Counting:
    found = Counting(kills)
    account.watch(cast(Environment, found))
    return found


def shown(memory: dict[str, object]) -> list[str]:
    environment = {"id": "x", **memory}
    return memory_lines(
        AttemptRecord(id=uuid4(), number=1, state=AttemptState.FINISHED, mode=Mode.EPHEMERAL, environment=environment)
    )


def test_kills_belong_to_the_stage_in_which_they_are_found() -> None:
    account = MemoryAccount(1000)
    first = watched(account, 5)
    assert account.look() == {"memory": {"limit_bytes": 1000, "killed": {"agent": 0}}}
    first.kills = 7
    account.look()
    account.stage = "grading"
    second = watched(account, 0)
    first.kills, second.kills = 8, 2
    assert account.look() == {"memory": {"limit_bytes": 1000, "killed": {"agent": 2, "grading": 3}}}
    first.kills = second.kills = None  # they have ended
    assert account.look() == {"memory": {"limit_bytes": 1000, "killed": {"agent": 2, "grading": 3}}}


def test_where_nobody_counts_nothing_is_said() -> None:
    account = MemoryAccount(1000)
    watched(account, None)
    account.watch(cast(Environment, object()))
    assert account.look() == {}


def test_a_person_is_shown_who_was_killed_and_by_which_limit() -> None:
    assert shown({"memory": {"limit_bytes": 1000, "killed": {"agent": 2, "grading": 1}}}) == [
        "out of memory: 3 killed at the memory limit of 1000 bytes (2 in agent, 1 in grading)"
    ]
    assert shown({"memory": {"limit_bytes": 1000, "killed": {"agent": 0, "grading": 0}}}) == []
    assert shown({}) == []


def test_what_is_killed_in_an_environment_that_was_given_back_is_somebody_elses() -> None:
    account, next_one = MemoryAccount(1000), MemoryAccount(1000)
    shared = watched(account, 0)
    shared.kills = 2
    account.leave(shared)
    next_one.watch(cast(Environment, shared))
    shared.kills = 3
    account.stage = "grading"
    account.watch(cast(Environment, shared))  # the same again
    shared.kills = 4
    assert account.look() == {"memory": {"limit_bytes": 1000, "killed": {"agent": 2, "grading": 1}}}
    assert next_one.look() == {"memory": {"limit_bytes": 1000, "killed": {"agent": 2}}}
