"""Who killed a process for memory: the task's own limit, or a host that was short of it. With real control groups."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.agents.base import AgentJob, AgentReport
from app.artifacts import open_store
from app.artifacts.bundles import store_bundle
from app.environments.runtimes.oci import OciProvider, available
from app.host import cgroups
from app.ledger.accept import NewRun, accept
from app.ledger.database import Database
from app.models.endings import EndReason
from app.models.shell import CancelToken, Shell
from app.models.spec import AgentTask, EnvironmentKind, EnvironmentSpec, Mode, Resources, ScriptGoal, TaskSpec
from app.settings import Settings
from app.workers import services
from app.workers.attempt import carry_out
from app.workers.lease import StopToken
from app.workers.services import WorkerServices
from tests.building import claim_of
from tests.integration.oci_fixture import add_image
from tests.integration.rows import one
from tests.services import MakeSettings, missing

MIB = 1 << 20
HOST = 96 * MIB
HOG = "head -c 160000000 /dev/zero | tail -c 160000000 >/dev/null; true"
"""Takes 160 MB of memory, and does not mind to be killed."""


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    settings = make_settings()
    if (why := available(settings)) is not None:
        missing(f"environments without a daemon: {why}")
    return settings


@pytest.fixture
def small_host(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Environments are made below a group of 96 MiB, which stands for a host of that size."""
    root, name = cgroups.ROOT, f"host-{uuid.uuid4().hex[:8]}"
    unified = (root / "cgroup.controllers").exists()
    group = root / name if unified else root / "memory" / name
    group.mkdir()
    if unified:
        (group / "memory.max").write_text(str(HOST))
        (group / "memory.swap.max").write_text("0")
        monkeypatch.setattr(cgroups, "ROOT", group)
    else:
        (group / "memory.limit_in_bytes").write_text(str(HOST))
        if (swap := group / "memory.memsw.limit_in_bytes").exists():
            swap.write_text(str(HOST))
        for controller in os.listdir(root):
            (tmp_path / controller).symlink_to(group if controller == "memory" else root / controller)
        monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    yield
    group.rmdir()


class Hog:
    """An agent that takes a lot of memory, and is done."""

    name, version, needs_model, needs_solution = "hog", "1", False, False

    def check(self) -> None:
        """Always there."""

    def run(self, job: AgentJob, shell: Shell, cancel: CancelToken) -> AgentReport:
        shell.run(HOG, timeout_s=60)
        return AgentReport(EndReason.SUBMITTED)


def carried_out(
    settings: Settings, database: Database, programs: Path, tests: Path, limit: int
) -> tuple[EndReason, dict[str, Any]]:
    """An attempt of a task with this memory limit, and its record."""
    (tests / "test.sh").write_text("mkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt\n")
    oci = OciProvider(settings, fetch_bundle=lambda bundle: b"")
    task = AgentTask(
        name="hungry",
        description="Take much.",
        environment=EnvironmentSpec(
            kind=EnvironmentKind.OCI,
            image=add_image(oci.store, {"sha256:programs": programs}),
            workdir="/tmp",
            resources=Resources(memory_bytes=limit),
        ),
        goal=ScriptGoal(tests=store_bundle(open_store(settings.artifacts()), tests)),
    )
    run = accept(database, NewRun(specs=[TaskSpec(task=task, agent="nop", mode=Mode.EPHEMERAL)]))
    here = services.build(settings, pooled=True, max_idle=0)
    try:
        reason = carry_out(claim_of(database, run, Mode.EPHEMERAL), here, StopToken())
    finally:
        here.close()
    return reason, one(database, "SELECT state, verdict, failure, environment FROM attempts")._asdict()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tests")


@pytest.mark.usefixtures("small_host")
def test_a_kill_below_the_tasks_own_limit_is_a_fault_of_the_host_and_is_done_again(
    settings: Settings, database: Database, oci_programs: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerServices, "agent", lambda this, name: Hog())
    reason, told = carried_out(settings, database, oci_programs, folder, 1024 * MIB)
    assert reason is EndReason.ENVIRONMENT_ERROR
    assert (told["state"], told["verdict"]) == ("error", None)
    assert told["failure"]["error"] == "HostOutOfMemory"
    memory = told["environment"]["memory"]
    assert (memory["killed"], memory["killed_by_host"]["agent"] >= 1) == ({"agent": 0}, True)
    assert one(database, "SELECT state FROM tasks").state == "pending"


def test_a_kill_at_the_tasks_own_limit_is_its_own_and_is_scored(
    settings: Settings, database: Database, oci_programs: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerServices, "agent", lambda this, name: Hog())
    reason, told = carried_out(settings, database, oci_programs, folder, 96 * MIB)
    assert (reason, told["state"]) == (EndReason.SUBMITTED, "finished")
    assert told["verdict"]["reward"] == 1.0
    environment = told["environment"]
    assert environment["memory"]["killed"]["agent"] == 1
    assert "killed_by_host" not in environment["memory"]
    sizes = {"cpus": 2.0, "memory_bytes": 96 * MIB, "kill_at": {"cpus": 2.0, "memory_bytes": 96 * MIB}}
    assert environment["resources"] == sizes
    assert environment["cpu"]["throttled_s"].keys() == {"agent", "grading"}
