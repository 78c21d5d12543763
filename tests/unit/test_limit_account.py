"""Whom the kernel killed for memory, or refused as one too many, stage by stage, and what a person is shown of it."""

from __future__ import annotations

from typing import cast
from uuid import uuid4

from app.cli.show import limit_lines
from app.environments.contract import Environment, ServiceMemory
from app.models.outcome import AttemptRecord
from app.models.spec import Mode, Resources
from app.models.states import AttemptState
from app.workers.limit_account import LimitAccount

LIMITS = Resources(memory_bytes=64 << 20, pids=64)


class Counting(Environment):
    """An environment by its count of kills."""

    def __init__(self, kills: int | None) -> None:
        self.kills = kills

    def memory_kills(self) -> int | None:
        return self.kills


class Several(Counting):
    """One with a service beside it."""

    def __init__(self, kills: int, beside: int) -> None:
        super().__init__(kills)
        self.beside: int | None = beside
        self.asked = 0

    def memory_beside(self) -> dict[str, ServiceMemory]:
        self.asked += 1
        return {} if self.beside is None else {"db": ServiceMemory(500, self.beside)}


class Refusing(Environment):
    """An environment by its count of processes that were too many."""

    refused: int | None = 5

    def processes_refused(self) -> int | None:
        return self.refused


def watched(account: LimitAccount, kills: int | None) -> Counting:
    found = Counting(kills)
    account.watch(cast(Environment, found))
    return found


def shown(told: dict[str, object]) -> list[str]:
    environment = {"id": "x", **told}
    return limit_lines(
        AttemptRecord(id=uuid4(), number=1, state=AttemptState.FINISHED, mode=Mode.EPHEMERAL, environment=environment)
    )


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


def test_what_is_killed_in_a_service_is_told_by_its_name_and_limit() -> None:
    account, environment = LimitAccount(LIMITS), Several(1, 3)
    account.watch(cast(Environment, environment))
    assert account.look() == {"memory": {"limit_bytes": 64 << 20, "killed": {"agent": 0}}}
    environment.beside = 4
    account.look()
    account.stage = "grading"
    environment.kills, environment.beside = 2, 6
    db = {"limit_bytes": 500, "killed": {"agent": 1, "grading": 2}}
    found = {"memory": {"limit_bytes": 64 << 20, "killed": {"agent": 0, "grading": 1}, "services": {"db": db}}}
    assert account.look() == found
    before = environment.asked
    account.look()
    assert environment.asked == before + 1, "all services at once"
    account.leave(environment)
    environment.kills, environment.beside = 9, 9
    assert account.look() == found, "somebody else's"
    again = LimitAccount(LIMITS)
    again.watch(cast(Environment, environment))
    environment.beside = 10
    again.look()
    environment.beside = None  # it has ended
    assert again.look()["memory"]["services"] == {"db": {"limit_bytes": 500, "killed": {"agent": 1}}}


def test_where_nobody_counts_nothing_is_said() -> None:
    account = LimitAccount(LIMITS)
    watched(account, None)
    assert account.look() == {}


def test_a_person_is_shown_who_was_killed_and_by_which_limit() -> None:
    assert shown({"memory": {"limit_bytes": 64 << 20, "killed": {"agent": 2, "grading": 1}}}) == [
        "out of memory: 3 killed at the memory limit of 67108864 bytes (2 in agent, 1 in grading)"
    ]
    assert shown({"memory": {"limit_bytes": 64 << 20, "killed": {"agent": 0, "grading": 0}}}) == []
    db = {"limit_bytes": 500, "killed": {"agent": 2, "grading": 0}}
    assert shown({"memory": {"limit_bytes": 1000, "killed": {"agent": 0}, "services": {"db": db}}}) == [
        "service db: out of memory: 2 killed at the memory limit of 500 bytes (2 in agent)"
    ]
    assert shown({}) == []


def test_processes_that_were_too_many_are_counted_as_kills_are_and_told_where_there_were_any() -> None:
    account, bombed = LimitAccount(LIMITS), Refusing()
    account.watch(cast(Environment, bombed))
    assert shown(account.look()) == [], "what was before is not told"
    bombed.refused = 45
    account.look()
    account.stage, bombed.refused = "grading", 46
    told = {"processes": {"limit": 64, "refused": {"agent": 40, "grading": 1}}}
    assert account.look() == told
    bombed.refused = None  # it has ended
    assert account.look() == told
    assert shown(account.look()) == ["too many processes: 41 refused at the limit of 64 (40 in agent, 1 in grading)"]
    watched(account, 0)
    assert account.look() == told | {"memory": {"limit_bytes": 64 << 20, "killed": {"grading": 0}}}


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
