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
