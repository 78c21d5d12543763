"""What a submission says of its tasks' environments: what goes before what, and what does not go together."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from pydantic import ValidationError

from app.agents.catalogue import AGENTS, Traits
from app.artifacts.bundles import bundle_key
from app.errors import ArtifactMissing, SpecInvalid
from app.models.overrides import EnvironmentOverrides, LimitOverrides
from app.models.resources import KillAt
from app.models.spec import (
    AgentTask,
    Bundle,
    Compose,
    EnvironmentKind,
    EnvironmentSpec,
    Limits,
    Network,
    PatchSolution,
    Reach,
    Resources,
    Reuse,
    ScriptGoal,
    ServiceScript,
    TaskSpec,
    TestsGoal,
)
from app.submission import refuse_wrong_projects, specs_for
from megaflow.contract.environments.fixture import tar_of
from tests.building import a_task

ROW_GOAL = TestsGoal(base_commit="c", test_patch="", test_command="true", fail_to_pass=("a",), pass_to_pass=())
OWN = {
    "image": "example",
    "network": Network.ALLOWLIST,
    "allowed_hosts": ("example.org",),
    "setup": ("own",),
    "reuse": Reuse.FRESH,
    "resources": Resources(cpus=1.0, disk_bytes=1 << 30),
}


def task_of(**environment: Any) -> AgentTask:
    spec = EnvironmentSpec.model_validate({"image": "example", **environment})
    return a_task().model_copy(update={"environment": spec, "goal": ROW_GOAL})


def specs(task: AgentTask, agent: str = "nop", **overrides: Any) -> list[TaskSpec]:
    known = AGENTS | {"looks": Traits(writes=False, tools=("looks",))}
    model = "replay" if AGENTS.get(agent, Traits()).needs_model else None
    return specs_for(
        [task], agent=agent, mode="auto", model=model, agents=known, overrides=EnvironmentOverrides(**overrides)
    )


def test_what_is_said_goes_before_the_task_and_the_rest_stays() -> None:
    (spec,) = specs(task_of(**OWN), network=Network.MODEL_ONLY, reuse=Reuse.RECYCLED, disk_bytes=2 << 30)
    found = spec.task.environment
    assert (found.network, found.allowed_hosts, found.reuse) == (Network.MODEL_ONLY, (), Reuse.RECYCLED)
    kill_at = KillAt(cpus=1.0, memory_bytes=6 << 30)  # the task states no memory
    assert found.resources == Resources(cpus=1.0, disk_bytes=2 << 30, kill_at=kill_at)
    assert (found.image, found.setup) == ("example", ("own",))


def test_a_limit_that_is_said_goes_before_the_tasks_own_and_the_rest_stays() -> None:
    task = task_of(**OWN).model_copy(update={"limits": Limits(max_steps=7, budget_usd=1.5)})
    assert LimitOverrides().applied_to(task) is task
    said = LimitOverrides(max_steps=50, agent_timeout_s=60.0)
    (spec,) = specs_for([task], agent="nop", mode="auto", model=None, agents=AGENTS, limits=said)
    assert spec.task.limits == Limits(max_steps=50, budget_usd=1.5, agent_timeout_s=60.0)


@pytest.mark.parametrize("endless", [float("inf"), float("nan")])
def test_a_time_without_an_end_is_refused_where_it_is_said(endless: float) -> None:
    with pytest.raises(ValidationError, match="finite"):
        Limits(agent_timeout_s=endless)
    with pytest.raises(ValidationError, match="finite"):
        LimitOverrides(command_timeout_s=endless)


def test_set_up_commands_are_added_to_the_tasks_own() -> None:
    (spec,) = specs(task_of(**OWN), setup=("more", "and more"))
    assert spec.task.environment.setup == ("own", "more", "and more")


def test_hosts_mean_an_allowlist_and_an_allowlist_keeps_the_tasks_hosts() -> None:
    hosts = EnvironmentOverrides(allowed_hosts=("other.example.org",))
    changed = hosts.applied_to(task_of()).environment
    assert (changed.network, changed.allowed_hosts) == (Network.ALLOWLIST, ("other.example.org",))
    assert hosts.applied_to(task_of(**OWN)).environment.allowed_hosts == ("other.example.org",)
    kept = EnvironmentOverrides(network=Network.ALLOWLIST).applied_to(task_of(**OWN))
    assert kept.environment.allowed_hosts == ("example.org",)


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ({"network": Network.ALLOWLIST}, r"'example-1': .*`allowed_hosts` with the network `allowlist`"),
        ({"network": Network.OPEN, "allowed_hosts": ("a.example",)}, "found 'open' with"),
        ({"allowed_hosts": ("http://a.example/",)}, "allowed_hosts: expected `name`"),
        ({"disk_bytes": 1 << 20}, r"environment\.resources\.disk_bytes: .*67108864"),
    ],
)
def test_values_that_contradict_each_other_are_refused_with_the_tasks_name(
    overrides: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(SpecInvalid, match=complaint):
        specs(task_of(), **overrides)


@pytest.mark.parametrize("agent", ["oracle", "mini-swe-agent", "claude-code"])
def test_an_agent_that_changes_files_has_no_read_only_environment(agent: str) -> None:
    task = task_of().model_copy(update={"solution": PatchSolution(patch="")})
    with pytest.raises(SpecInvalid, match=rf"'example-1': .*'fresh' or 'recycled' with agent '{agent}'"):
        specs(task, agent, reuse=Reuse.SHARED_READONLY)


@pytest.mark.parametrize("agent", ["nop", "looks"])
def test_an_agent_that_changes_none_may_share_one(agent: str) -> None:
    (spec,) = specs(task_of(), agent, reuse=Reuse.SHARED_READONLY)
    assert spec.task.environment.reuse is Reuse.SHARED_READONLY


def test_where_a_script_judges_in_the_agents_environment_none_is_shared() -> None:
    script = task_of().model_copy(update={"goal": ScriptGoal(tests=Bundle(sha256="0" * 64, size_bytes=0))})
    with pytest.raises(SpecInvalid, match=r"'example-1': .*several tasks would write their rewards to one place"):
        specs(script, reuse=Reuse.SHARED_READONLY)


def test_what_can_be_written_to_is_not_shared() -> None:
    with pytest.raises(SpecInvalid, match="for the kind 'local'"):
        specs(task_of(kind=EnvironmentKind.LOCAL), reuse=Reuse.SHARED_READONLY)


def test_an_agent_inside_keeps_the_way_to_its_model() -> None:
    with pytest.raises(SpecInvalid, match=r"agent 'claude-code' runs inside .*found 'none'"):
        specs(task_of(), "claude-code", network=Network.NONE)
    (lifted,) = specs(task_of(network=Network.NONE), "claude-code")
    assert lifted.task.environment.network is Network.MODEL_ONLY
    (without,) = specs(task_of(), "looks", network=Network.NONE)
    assert without.task.environment.tools == ("looks",)


def test_no_engineless_environment_has_an_open_network() -> None:
    with pytest.raises(SpecInvalid, match=r"'example-1': .*than 'open' for the kind 'oci'"):
        specs(task_of(kind=EnvironmentKind.OCI), network=Network.OPEN)


def test_whoever_grades_apart_may_write() -> None:
    shared = EnvironmentSpec(image="example", reuse=Reuse.SHARED_READONLY, tools=("looks",))
    graded = shared.for_grading(shared)
    assert (graded.reuse, graded.tools, graded.image) == (Reuse.FRESH, (), "example")
    assert EnvironmentSpec(image="example").for_grading(Reach()).reuse is Reuse.RECYCLED


def test_no_submission_changes_what_a_grader_reaches() -> None:
    for own, changes in (
        (Reach(), {"network": Network.OPEN}),
        (Reach(network=Network.OPEN), {"network": Network.NONE}),
    ):
        (spec,) = specs(task_of(grading=own), **changes)
        assert (spec.task.environment.network, spec.task.environment.grading) == (changes["network"], own)


def project(text: str) -> tuple[Bundle, bytes]:
    content = tar_of({"docker-compose.yaml": text.encode()})
    return Bundle(sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content)), content


def several(bundle: Bundle, service: str | None = None) -> AgentTask:
    environment = EnvironmentSpec(compose=Compose(context=bundle))
    goal = ScriptGoal(tests=Bundle(sha256="0" * 64, size_bytes=0), service=service)
    return a_task().model_copy(update={"environment": environment, "goal": goal})


def test_a_project_that_is_well_is_read_once_for_all_its_tasks() -> None:
    bundle, packed = project("services: {main: {image: a}, db: {image: b}}")
    asked = []

    def fetch(wanted: Bundle) -> bytes:
        asked.append(wanted)
        return packed

    refuse_wrong_projects([several(bundle), several(bundle, "db"), task_of()], fetch)
    assert asked == [bundle]
    with pytest.raises(SpecInvalid, match=r"'example-1': .*among db, main; found 'shop'"):
        refuse_wrong_projects([several(bundle, "shop")], fetch)
    beside = several(bundle, "db")
    assert isinstance(beside.goal, ScriptGoal)
    both = beside.goal.model_copy(update={"also": (ServiceScript(service="cache", command="true"),)})
    with pytest.raises(SpecInvalid, match=r"among db, main; found 'cache'"):
        refuse_wrong_projects([beside.model_copy(update={"goal": both})], fetch)
    with pytest.raises(SpecInvalid, match=r"expected a compose file with the services that judge; found 'cache', 'db'"):
        refuse_wrong_projects([task_of().model_copy(update={"goal": both})], fetch)


def test_a_project_that_nobody_has_stored_is_named() -> None:
    bundle, _ = project("services: {main: {image: a}}")

    def fetch(wanted: Bundle) -> bytes:
        raise ArtifactMissing(f"{bundle_key(wanted)}: expected an object; found none")

    with pytest.raises(SpecInvalid, match=r"'example-1': bundles/"):
        refuse_wrong_projects([several(bundle)], fetch)


def test_several_containers_belong_to_one_task() -> None:
    bundle, _ = project("services: {main: {image: a}}")
    complaint = "with several containers, found 'shared-readonly': .*leave `reuse` out"
    with pytest.raises(ValidationError, match=complaint):
        EnvironmentSpec(compose=Compose(context=bundle), reuse=Reuse.SHARED_READONLY)
    task = several(bundle).model_copy(update={"goal": ROW_GOAL})
    with pytest.raises(SpecInvalid, match=f"'example-1': environment: .*{complaint}"):
        EnvironmentOverrides(reuse=Reuse.SHARED_READONLY).applied_to(task)
    assert EnvironmentSpec(compose=Compose(context=bundle), reuse=Reuse.FRESH).reuse is Reuse.FRESH


def test_a_project_made_by_hand_is_refused_for_all_that_it_asks_of_the_host() -> None:
    bundle, packed = project(
        "services: {main: {image: a}, db: {image: b, privileged: true, pid: host, volumes: ['/:/host']}}"
    )
    with pytest.raises(SpecInvalid) as caught:
        refuse_wrong_projects([several(bundle)], lambda wanted: packed)
    for part in ("'example-1'", "services.db.privileged", "services.db.pid", "services.db.volumes"):
        assert part in str(caught.value)
