"""Every host sweeps what is its own, wherever the control plane is: a real ledger and engine, a worker killed -9."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from app.environments.runtimes.compose.resources import PROJECT
from app.environments.runtimes.oci import OciProvider, available
from app.host.engine import engine_of
from app.ledger import host_images, instances
from app.ledger.database import Database
from app.ledger.host_images import EndedInstance
from app.models.spec import EnvironmentSpec
from app.settings import Settings
from app.workers import host_care, host_sweep
from app.workers.host_sweep import Rounds, lead_here, leads_here
from megaflow.contract.environments.fixture import sweep_all
from tests.building import RETRY
from tests.integration.oci_fixture import add_image, alive, left_over
from tests.integration.rows import ago, an_instance, one
from tests.integration.test_compose_environment import PAIR, STORED, left, spec_of
from tests.services import MakeSettings, missing
from tests.waiting import eventually

HERE = "here"

WORKER = """
import sys, time
from pathlib import Path
from uuid import UUID
from app.environments.contract import Tags
from app.environments import sweeper
from app.environments.runtimes.compose.provider import ComposeProvider
from app.environments.runtimes.oci import OciProvider
from app.models.spec import EnvironmentSpec
from app.settings import Settings

home, installation, instance, archive, several, alone = sys.argv[1:]
settings, content = Settings(home=Path(home), installation=installation), Path(archive).read_bytes()
tags = Tags(installation, *[UUID(instance)] * 4, time.time() + 600)
several, alone = (EnvironmentSpec.model_validate_json(spec) for spec in (several, alone))
made = ComposeProvider(settings, fetch_bundle=lambda bundle: content).create(several, tags, timeout_s=60)
beside = OciProvider(settings, fetch_bundle=lambda bundle: content).create(alone, tags, timeout_s=60)
beside.run("sleep 600 > /dev/null 2>&1 &", timeout_s=10)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings(image_prefetch=0, sweep_s=0.5)


def swept(database: Database, instance_id: UUID) -> bool:
    return one(database, "SELECT swept_at FROM instances WHERE id = :id", id=instance_id).swept_at is not None


@pytest.fixture
def fixture(settings: Settings, docker_engine: str, oci_cache: Path) -> Iterator[Settings]:
    """A home and an engine for containers of both kinds."""
    if not (settings.home / "cache").exists():
        (settings.home / "cache").symlink_to(oci_cache)
    if (why := available(settings)) is not None:
        missing(f"environments without a daemon: {why}")
    yield settings
    sweep_all(settings)


@pytest.mark.docker
def test_a_host_that_runs_only_a_pool_removes_what_a_killed_worker_left(
    fixture: Settings, database: Database, base_image_tag: str, oci_programs: Path, tmp_path: Path
) -> None:
    instance = _killed_worker(fixture, base_image_tag, oci_programs, tmp_path)
    project = _project(fixture)
    kinds = [_kind(fixture, one) for one in left(engine_of(fixture), fixture)]
    assert sorted(kinds) == ["container", "container", "network", "volume"], "there is something to be left"
    assert left_over(fixture.home) != []
    handle = f"{fixture.host()}:1"
    an_instance(database, id=instance, mode="persistent", provider="static", handle=handle)
    with host_care.caring(fixture, database):
        time.sleep(2.0)
        assert len(left(engine_of(fixture), fixture)) == 4, "its instance lives, as far as anybody knows"
        assert instances.exited(database, instance, None, "no sign of life", RETRY)  # a reconciler elsewhere
        eventually(lambda: left(engine_of(fixture), fixture) == [], "an empty engine")
        eventually(lambda: left_over(fixture.home) == [], "an empty home")
        eventually(lambda: swept(database, instance), "the ledger to know")
    assert alive(fixture.home) == []
    assert _groups(project) == []


def _project(settings: Settings) -> str:
    ours = {"label": [f"megaflow={settings.installation}", PROJECT]}
    return str(engine_of(settings).api.containers(filters=ours)[0]["Labels"][PROJECT])


def _groups(project: str) -> list[Path]:
    """Control groups around a project."""
    return [found for at in ("", "*/") for found in Path("/sys/fs/cgroup").glob(f"{at}megaflow-project-{project}")]


def _killed_worker(settings: Settings, base_image_tag: str, programs: Path, folder: Path) -> UUID:
    """One that had an environment of two containers and one without an engine; its instance."""
    instance = uuid.uuid4()
    several = spec_of(PAIR.replace("BASE", base_image_tag))
    assert several.compose is not None
    (folder / "context.tar").write_bytes(STORED[several.compose.context.sha256])
    store = OciProvider(settings, fetch_bundle=lambda bundle: b"").store
    alone = EnvironmentSpec(
        image=add_image(store, {"sha256:programs": programs}), workdir="/tmp", env={"TEST_HOME": str(settings.home)}
    )
    specs = (several.model_dump_json(), alone.model_dump_json())
    words = [str(settings.home), settings.installation, str(instance), str(folder / "context.tar"), *specs]
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, *words], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as worker:
        assert worker.stdout is not None
        assert b"ready\n" in iter(worker.stdout.readline, b"")
        worker.kill()
    return instance


def _kind(settings: Settings, name: str) -> str:
    if len(name) == 64:
        return "container"
    return "volume" if name.endswith("-kept") else "network"


def an_ended(database: Database, host: str | None = None, **values: object) -> UUID:
    defaults = {"state": "terminated", "ended_at": ago(1), "host": host}
    return an_instance(database, mode="persistent", **(defaults | values))


def told(database: Database, host: str, *, control: bool = False) -> set[EndedInstance]:
    return set(host_images.unswept(database, host, control=control))


def test_an_instance_is_swept_by_the_host_that_it_stood_on(settings: Settings, database: Database) -> None:
    for host in (HERE, "there"):
        host_images.report(database, host, [])
    mine, theirs = an_ended(database, HERE), an_ended(database, "there")
    static = an_ended(database, provider="static", handle=f"{HERE}:7")
    assert told(database, HERE) == {EndedInstance(mine, True), EndedInstance(static, True)}
    assert told(database, "there", control=True) == {EndedInstance(theirs, True)}
    lead_here(settings)  # the leader is here: what stood there is theirs all the same
    Rounds(settings, database, HERE).sweep()
    assert [swept(database, one) for one in (mine, theirs, static)] == [True, False, True]


def test_what_stood_nowhere_or_on_a_host_that_is_away_is_swept_by_the_leaders_host(
    settings: Settings, database: Database
) -> None:
    nowhere, away = an_ended(database), an_ended(database, "there")
    rounds = Rounds(settings, database, HERE)
    assert not leads_here(settings)
    rounds.sweep()
    assert told(database, HERE) == {EndedInstance(nowhere, False), EndedInstance(away, False)}
    lead_here(settings)
    assert leads_here(settings)
    rounds.sweep()
    assert told(database, HERE) == set()


def test_an_instance_that_has_ended_is_swept_at_once_and_no_round_is_made_for_one_that_was(
    settings: Settings, database: Database
) -> None:
    rounds = Rounds(settings, database, HERE)
    rounds.sweep()
    assert not rounds.more()
    an_ended(database)  # not ours to tell: it stays on the list
    assert rounds.more()
    rounds.sweep()
    assert not rounds.more()


def test_a_leader_that_says_no_more_that_it_is_here_is_elsewhere(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead_here(settings)
    monkeypatch.setattr(host_sweep, "_LEADS_S", 0.0)
    assert not leads_here(settings)
