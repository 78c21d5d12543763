"""How environments come to their attempts on a real system: shared set-ups, reuse, sharing, an allowlist."""

from __future__ import annotations

from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import pytest

from app import evaluation
from app.environments.contract import UNSEEN
from app.ledger import classes
from app.models.outcome import TaskResult
from app.models.spec import AgentTask, EnvironmentKind, Mode, Network, Reuse, ScriptSolution
from tests.acceptance.conftest import System

pytestmark = [pytest.mark.docker, pytest.mark.timeout(400)]

SET_UP = "sleep 2 && date > /opt/made-by-the-set-up"
ASK = "python3 -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=20)' {} 2> /dev/null"


def changed(task: AgentTask, *, only_if: str = "", **environment: Any) -> AgentTask:
    """The task in another environment; only_if: a command inside without whose success the solution is not applied."""
    found = AgentTask.model_validate(task.model_dump() | {"environment": task.environment.model_dump() | environment})
    if not only_if:
        return found
    assert isinstance(found.solution, ScriptSolution)
    command = f"{only_if} && {found.solution.command}"
    return found.model_copy(update={"solution": found.solution.model_copy(update={"command": command})})


def paths(results: list[TaskResult]) -> list[str]:
    """By which path each attempt's own environment came."""
    return [attempt.environment["path"] for one in results for attempt in one.attempts]


@pytest.fixture(scope="module")
def tasks(system: System) -> dict[str, AgentTask]:
    return {task.name: task for task in evaluation.demo_tasks(system.settings, EnvironmentKind.DOCKER)}


def test_an_agent_that_changes_nothing_is_lent_an_environment(system: System, tasks: dict[str, AgentTask]) -> None:
    task = changed(tasks["python-semver__python-semver-1"], reuse=Reuse.SHARED_READONLY)
    results = system.flow.enqueue_many([task], agent="nop", mode=Mode.PERSISTENT, replicas=3).results(timeout=300)
    assert [one.attempt.environment.get("shared") for one in results if one.attempt] == [True] * 3
    assert all(one.reward == 0.0 and one.verdict is not None and one.verdict.tests for one in results)


def test_a_used_environment_is_used_again_unless_the_task_wants_a_fresh_one(
    system: System, tasks: dict[str, AgentTask]
) -> None:
    with system.flow.database.begin() as connection:
        pool = classes.load(connection, system.settings)[classes.STANDARD]
    task, more = tasks["finish-merge"], pool.pool_max * pool.pool_slots + 2
    again = system.flow.enqueue_many([task], agent="oracle", mode=Mode.PERSISTENT, replicas=more).results(timeout=300)
    assert {one.reward for one in again} == {1.0}
    resets = [
        one.attempt.environment.get("teardown", {}).get("agent", {}).get("reset") or {} for one in again if one.attempt
    ]
    if not all(reset.get("left") == [UNSEEN] for reset in resets):  # else nothing can be proven clean on this host
        assert Counter(paths(again))["recycled"] >= 1
    fresh = changed(task, reuse=Reuse.FRESH)
    alone = system.flow.enqueue_many([fresh], agent="oracle", mode=Mode.PERSISTENT, replicas=2).results(timeout=300)
    assert {one.reward for one in alone} == {1.0}
    assert not set(paths(alone)) & {"recycled", "shared"}


def test_replicas_share_what_one_set_up_made(system: System, tasks: dict[str, AgentTask]) -> None:
    task = changed(tasks["lost-settings"], only_if="test -s /opt/made-by-the-set-up", setup=(SET_UP,))
    results = system.flow.enqueue_many([task], agent="oracle", mode=Mode.EPHEMERAL, replicas=4).results(timeout=300)
    assert {one.reward for one in results} == {1.0}
    told = [one.attempt.environment for one in results if one.attempt]
    assert sum(one["phases"].get("set_up", 0.0) > 1.0 for one in told) <= 1, "the others begin with what it made"
    for one in told:
        assert sum(one["phases"].values()) == pytest.approx(one["ready_s"], abs=0.001)


def test_an_allowlist_leads_to_its_host_and_nowhere_else(system: System, tasks: dict[str, AgentTask]) -> None:
    port = urlsplit(system.settings.gateway_bases()[0]).port
    url = f"http://localhost:{port}/health"
    ask = f"(unset no_proxy NO_PROXY; {ASK.format(url)} && ! {ASK.format('http://example.invalid/')})"
    task = changed(tasks["order-ledger"], only_if=ask, network=Network.ALLOWLIST, allowed_hosts=(f"localhost:{port}",))
    (one,) = system.flow.enqueue_many([task], agent="oracle", mode=Mode.EPHEMERAL).results(timeout=300)
    assert one.reward == 1.0
    assert one.attempt is not None
    assert one.attempt.environment["network"] == "allowlist"
