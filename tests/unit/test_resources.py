"""The two sizes of a task: what is guaranteed, at what it is killed, and what follows from each."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from app.agents.catalogue import AGENTS
from app.cli.submission_options import factor_of
from app.compose_file.model import Service
from app.compose_file.plan import resources_of
from app.errors import SpecInvalid
from app.host.privileges import cpu_shares
from app.models.overrides import EnvironmentOverrides
from app.models.resources import KillAt, Resources
from app.models.spec import AgentTask, EnvironmentSpec, ScriptGoal
from app.models.validation import content_of
from app.settings import Settings
from app.submission import size_of, specs_for
from tests.building import a_task

GIB = 1 << 30
SIZE = Resources(cpus=4, memory_bytes=8 * GIB)


def numbers(found: Resources) -> tuple[float, float, float, float]:
    return found.cpus, found.memory_bytes / GIB, found.most.cpus, found.most.memory_bytes / GIB


@pytest.mark.parametrize(
    ("said", "factor", "expected"),
    [
        ({}, None, (4, 8, 12, 24)),
        ({"disk_bytes": GIB, "pids": 64}, None, (4, 8, 12, 24)),
        ({"cpus": 1.0, "memory_bytes": GIB}, None, (1, 1, 1, 1)),
        ({"memory_bytes": GIB}, None, (4, 1, 12, 1)),
        ({"memory_bytes": GIB}, 2.5, (4, 1, 10, 2.5)),
        ({}, 1.0, (4, 8, 4, 8)),
        ({"cpus": 200.0, "memory_bytes": GIB}, 3.0, (200, 1, 256, 3)),
        ({"cpus": 1, "memory_bytes": GIB, "kill_at": {"cpus": 2, "memory_bytes": 5 * GIB}}, None, (1, 1, 2, 5)),
        ({"cpus": 1, "memory_bytes": GIB, "kill_at": {"cpus": 2, "memory_bytes": 5 * GIB}}, 1.0, (1, 1, 1, 1)),
    ],
)
def test_a_stated_size_is_a_limit_and_an_unstated_one_may_grow(
    said: dict[str, Any], factor: float | None, expected: tuple[float, ...]
) -> None:
    found = Resources(**said).sized(factor, SIZE)
    assert numbers(found) == expected
    assert numbers(found.sized(None, Resources())) == expected, "what is decided stays"
    assert Resources.model_validate_json(found.model_dump_json()) == found


def test_no_task_is_killed_below_what_it_is_guaranteed() -> None:
    with pytest.raises(ValidationError, match="at least what is guaranteed"):
        Resources(cpus=2, kill_at=KillAt(cpus=1, memory_bytes=4 * GIB))
    given = Resources(cpus=1, kill_at=KillAt(cpus=1, memory_bytes=2 * GIB)).sized(None, SIZE)
    assert numbers(given) == (1, 8, 1, 8), "the default size is more than what the task gave"


def submitted(task: AgentTask, **overrides: Any) -> AgentTask:
    size = size_of(Settings(task_cpus=1, task_memory_bytes=GIB))
    asked = EnvironmentOverrides(**overrides)
    (spec,) = specs_for([task], agent="nop", mode="auto", model=None, agents=AGENTS, overrides=asked, size=size)
    return spec.task


def test_a_submission_sizes_the_task_and_its_verifier_and_other_overrides_leave_that() -> None:
    apart = EnvironmentSpec(image="judge", resources=Resources(memory_bytes=2 * GIB))
    goal = ScriptGoal(tests=a_task().goal.tests, environment=apart)  # type: ignore[union-attr]
    task = a_task().model_copy(update={"goal": goal})
    for more in ({"disk_bytes": GIB, "setup": ("make",)}, {}):
        found = submitted(task, **more)
        assert numbers(found.environment.resources) == (1, 1, 3, 3)
        assert isinstance(found.goal, ScriptGoal)
        assert found.goal.environment is not None
        assert numbers(found.goal.environment.resources) == (1, 2, 3, 2)
    twice = submitted(task, kill_at=2.0)
    assert numbers(twice.environment.resources) == (1, 1, 2, 2)
    assert content_of(twice.model_dump(mode="json")) == content_of(found.model_dump(mode="json")), "one task"


@pytest.mark.parametrize(("given", "factor"), [("3x", 3.0), ("1", 1.0), (" 1.5x", 1.5), ("64x", 64.0)])
def test_a_factor_is_read(given: str, factor: float) -> None:
    assert factor_of(given) == factor


@pytest.mark.parametrize("given", ["", "x", "0.5x", "65x", "nan", "inf", "-3x", "3xx", "three"])
def test_what_is_no_factor_is_refused(given: str) -> None:
    with pytest.raises(SpecInvalid, match="expected a factor such as 3x"):
        factor_of(given)


def test_a_service_may_take_as_many_times_its_own_size_as_the_task() -> None:
    task = Resources(cpus=2, memory_bytes=4 * GIB).sized(3, SIZE)
    service = Service.model_construct(cpus=0.5, mem_limit=GIB)
    plain = Service.model_construct(cpus=None, mem_limit=None)
    assert numbers(resources_of(service, task)) == (0.5, 1, 1.5, 3)
    assert numbers(resources_of(plain, task)) == numbers(task)


def test_processors_that_are_short_are_shared_by_what_is_guaranteed() -> None:
    sizes = [Resources(cpus=cpus).sized(factor, SIZE) for cpus in (0.01, 1, 2, 100) for factor in (1, 3)]
    assert [cpu_shares(one) for one in sizes] == [2, 2, 64, 64, 128, 128, 512, 512]
