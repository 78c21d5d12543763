"""Whom the kernel killed for memory, or refused as one too many, stage by stage, and what a person is shown of it."""

from __future__ import annotations

from typing import cast

from app.environments.contract import Environment
from app.models.spec import Resources
from app.workers.limit_account import LimitAccount

LIMITS = Resources(memory_bytes=64 << 20, pids=64)


class Counting(Environment):
    """An environment by its count of kills."""

    def __init__(self, kills: int | None) -> None:
        self.kills = kills

    def memory_kills(self) -> int | None:
        return self.kills


def watched(account: LimitAccount, kills: int | None) -> Counting:
    found = Counting(kills)
    account.watch(cast(Environment, found))
    return found


def test_kills_belong_to_the_stage_in_which_they_are_found() -> None:
    account = LimitAccount(LIMITS)
    first = watched(account, 5)
    assert account.look() == {"memory": {"limit_bytes": 64 << 20, "killed": {"agent": 0}}}
    first.kills = 7
    account.look()
    account.stage = "grading"
    second = watched(account, 0)
    first.kills, second.kills = 8, 2
    assert account.look() == {"memory": {"limit_bytes": 64 << 20, "killed": {"agent": 2, "grading": 3}}}
    first.kills = second.kills = None  # they have ended
    assert account.look() == {"memory": {"limit_bytes": 64 << 20, "killed": {"agent": 2, "grading": 3}}}


def test_what_is_killed_in_an_environment_that_was_given_back_is_somebody_elses() -> None:
    account, next_one = LimitAccount(LIMITS), LimitAccount(LIMITS)
    shared = watched(account, 0)
    shared.kills = 2
    account.leave(shared)
    next_one.watch(cast(Environment, shared))
    shared.kills = 3
    account.stage = "grading"
    account.watch(cast(Environment, shared))  # the same again
    shared.kills = 4
    assert account.look() == {"memory": {"limit_bytes": 64 << 20, "killed": {"agent": 2, "grading": 1}}}
    assert next_one.look() == {"memory": {"limit_bytes": 64 << 20, "killed": {"agent": 2}}}
