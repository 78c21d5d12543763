"""Whom the kernel killed for memory, or refused as one too many, stage by stage, and what a person is shown of it."""

from __future__ import annotations

from typing import cast

import pytest

from app.environments.contract import Environment
from app.errors import HostOutOfMemory
from app.models.endings import BLAME, Blame, reason_of
from app.models.spec import Resources
from app.workers.limit_account import LimitAccount

LIMITS = Resources(memory_bytes=64 << 20, pids=64)


class Counting(Environment):
    """An environment by its count of kills."""

    def __init__(self, kills: int | None) -> None:
        self.kills = kills

        self.by_host: int | None = None
        self.held_up_s: float | None = None

    def memory_kills(self) -> int | None:
        return self.kills

    def host_kills(self) -> int | None:
        return self.by_host

    def throttled_s(self) -> float | None:
        return self.held_up_s


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


def test_a_kill_of_the_host_is_no_result_and_one_before_the_attempt_is_anothers() -> None:
    account = LimitAccount(LIMITS)
    environment = Counting(0)
    environment.by_host = 3
    account.watch(cast(Environment, environment))
    account.refuse_host_kills()
    assert account.look()["memory"] == {"limit_bytes": 64 << 20, "killed": {"agent": 0}}
    environment.by_host = 5
    with pytest.raises(HostOutOfMemory, match=r"2 killed.*never met its own limit of 67108864 bytes") as error:
        account.refuse_host_kills()
    assert BLAME[reason_of(error.value)] is Blame.INFRASTRUCTURE
    environment.by_host = None  # it has ended
    assert account.look()["memory"]["killed_by_host"] == {"agent": 2}


def test_the_time_held_up_is_told_by_stage_with_the_limit_that_did_it() -> None:
    account = LimitAccount(LIMITS.sized(3, LIMITS))
    environment = watched(account, 0)
    assert "cpu" not in account.look()
    environment.held_up_s = 1.0
    account.watch(cast(Environment, environment))
    environment.held_up_s = 3.25
    account.look()
    account.stage = "grading"
    environment.held_up_s = 3.75
    assert account.look()["cpu"] == {"limit": 6.0, "throttled_s": {"agent": 2.25, "grading": 0.5}}
