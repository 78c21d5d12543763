"""What a task may have holds for all services of its project together, by a control group around their containers."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest

from app.environments.runtimes.compose.environment import ComposeEnvironment
from app.environments.runtimes.compose.resources import BOUNDED_APART, shared
from app.environments.sweeper import Sweeper
from app.host import cgroups
from app.host.engine import Engine
from app.models.spec import Resources
from app.settings import Settings
from tests.integration.test_compose_environment import Create, engine, provider, services, settings
from tests.integration.test_compose_environment import create as any_project
from tests.services import missing
from tests.waiting import eventually

__all__ = ["any_project", "engine", "provider", "settings"]
pytestmark = [pytest.mark.docker, pytest.mark.extra]

MIB = 1 << 20
MOST = Resources(cpus=1, memory_bytes=160 * MIB, pids=96)
IDLE = "command: [sleep, '600']"
PAIR = f"services: {{main: {{image: BASE}}, beside: {{image: BASE, {IDLE}}}}}"
TRIO = f"services: {{main: {{image: BASE}}, beside: {{image: BASE, {IDLE}}}, other: {{image: BASE, {IDLE}}}}}"
ALONE = PAIR.replace("image: BASE", "image: BASE, network_mode: none")
HUNGRY = TRIO.replace("[sleep, '600']", '[python3, -c, "HELD"]')
"""Its services beside take MB of memory each and keep them."""
HELD = "import time; held = b'x' * (MB << 20); open('/tmp/held', 'w'); time.sleep(600)"
AWAIT = "while [ ! -e /tmp/held ]; do sleep 0.1; done"
TAKE = "python3 -c \"held = b'x' * (MB << 20)\""
FORK = "i=0; while [ $i -lt 70 ]; do sleep 30 & i=$((i+1)); done; echo all"


@pytest.fixture
def create(any_project: Create) -> Create:
    return functools.partial(any_project, resources=MOST)


@pytest.fixture
def held(create: Create, engine: Engine) -> Create:
    """Makes projects that are held together; elsewhere there is nothing to be seen."""
    if os.geteuid() != 0 or engine.about["CgroupDriver"] != "cgroupfs":
        missing("an engine of this host that keeps its cgroups in the file system, and root")

    def make(text: str, **fields: Any) -> ComposeEnvironment:
        environment = create(text, **fields)
        assert environment._resources.cgroup is not None
        return environment

    return make


def folders(environment: ComposeEnvironment) -> list[Path]:
    """The group, of every controller, as it stands."""
    name = f"megaflow-project-{environment._resources.id}"
    return [found for at in ("", "*/") for found in Path("/sys/fs/cgroup").glob(f"{at}{name}")]


def groups_of(engine: Engine, environment: ComposeEnvironment) -> list[bool]:
    """Of each container that runs: whether it is in the group."""
    name = f"megaflow-project-{environment._resources.id}"
    states = [engine.api.inspect_container(one)["State"] for one in environment.created_resources().containers]
    running = [state["Pid"] for state in states if state["Running"]]
    return [f"/{name}/" in Path(f"/proc/{pid}/cgroup").read_text() for pid in running]


def test_services_that_together_want_more_than_twice_the_memory_of_their_task_are_stopped(held: Create) -> None:
    text = HUNGRY.replace("HELD", HELD.replace("MB", "130"), 1).replace("HELD", HELD.replace("MB", "100"))
    hungry, neighbour = held(text), held(PAIR)
    for name in ("beside", "other"):
        assert hungry.run_in(name, AWAIT, timeout_s=60).ok, "alone it has as much as the task"
    assert hungry.run(TAKE.replace("MB", "110"), timeout_s=60).ok, "the largest of the three went"
    eventually(lambda: services(hungry)["beside"]["state"] == "exited")  # the engine hears of it a moment later
    told = services(hungry)
    assert (told["beside"]["state"], told["beside"]["exit_code"]) == ("exited", 137)
    assert told["other"]["state"] == "running"
    assert neighbour.run(TAKE.replace("MB", "100"), timeout_s=60).ok
    assert neighbour.memory_kills() == 0


def test_a_command_that_is_killed_for_what_a_service_holds_was_out_of_memory(held: Create) -> None:
    environment = held(HUNGRY.replace("HELD", HELD.replace("MB", "95")))
    for name in ("beside", "other"):
        assert environment.run_in(name, AWAIT, timeout_s=60).ok
    done = environment.run(TAKE.replace("MB", "140"), timeout_s=60)
    assert (done.exit_code, done.out_of_memory) == (137, True)
    assert environment.memory_kills() == 1
    assert services(environment)["beside"]["state"] == "running"


def test_services_have_twice_their_tasks_processes_and_processors_together(held: Create) -> None:
    crowded, neighbour = held(TRIO), held(PAIR)
    for name in ("beside", "other"):
        assert crowded.run_in(name, FORK, timeout_s=60).text() == "all\n"
    refused = crowded.run(FORK, timeout_s=60)
    assert not refused.ok
    assert "fork" in refused.text().lower()
    assert neighbour.run(FORK, timeout_s=60).text() == "all\n"
    quotas = [found.read_text().split() for one in folders(crowded) for found in one.glob("cpu.cfs_quota_us")]
    quotas += [found.read_text().split()[:1] for one in folders(crowded) for found in one.glob("cpu.max")]
    assert [quota for (quota,) in quotas] == ["200000"] * len(quotas)
    assert quotas


def test_a_reset_leaves_all_in_their_group_and_an_end_takes_it_away(held: Create, engine: Engine) -> None:
    environment = held(PAIR)
    assert groups_of(engine, environment) == [True, True]
    assert environment.reset().clean
    assert groups_of(engine, environment) == [True, True]
    assert folders(environment) != []
    environment.destroy()
    assert folders(environment) == []


@pytest.mark.parametrize("text", [PAIR, ALONE], ids=["network", "no network"])
def test_what_a_killed_worker_left_goes_with_its_group_and_what_is_kept_has_its_own(
    held: Create, settings: Settings, text: str
) -> None:
    lost, kept = held(text), held(text)
    ended, living = (one._resources.tags.instance_id for one in (lost, kept))
    assert Sweeper(settings).sweep({living}, ended={ended}).removed == (3 if text == PAIR else 2)
    eventually(lambda: folders(lost) == [], "no group of it")
    assert folders(kept) != []
    assert kept.run("true", timeout_s=20).ok


def test_where_no_group_can_be_made_services_are_bounded_one_by_one_and_the_record_says_so(
    create: Create, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "ROOT", Path("/proc"))  # where nobody makes folders
    environment = create(PAIR)
    assert environment._resources.cgroup is None
    assert BOUNDED_APART in environment.describe()["notes"]
    told = [engine.api.inspect_container(one["id"])["HostConfig"] for one in services(environment).values()]
    assert [(one["CgroupParent"], one["Memory"], one["PidsLimit"]) for one in told] == [("", 160 * MIB, 96)] * 2
    environment.destroy()
    assert folders(environment) == []


def test_a_worker_that_is_killed_before_its_first_container_leaves_no_group_either(
    held: Create, engine: Engine, settings: Settings
) -> None:
    environment = held(PAIR)
    for container in environment.created_resources().containers:
        engine.remove(container)
    environment._resources.create_cgroup()
    assert folders(environment) != []
    assert [part.remove(engine) for part in shared(engine, settings.installation)] == [True]
    assert folders(environment) == []
