"""What would not go: a real engine and real folders that refuse; the others go, and it is tried again."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from app.environments.contract import Tags
from app.environments.runtimes.compose.provider import ComposeProvider
from app.environments.runtimes.docker.provider import DockerProvider
from app.environments.runtimes.local.environment import LocalProvider
from app.environments.runtimes.oci import OciProvider
from app.environments.sweeper import Sweeper, Swept
from app.errors import EnvironmentFailed
from app.host.engine import Engine, engine_of
from app.ledger.database import Database
from app.ledger.receipts import ObjectKind, of_run
from app.models.spec import EnvironmentSpec
from app.settings import Settings
from app.workers.host_sweep import Rounds, lead_here
from megaflow.contract.environments.fixture import sweep_all
from tests.integration.engine_proxy import EngineProxy, engine_proxy
from tests.integration.oci_fixture import left_over
from tests.integration.rows import one
from tests.integration.test_compose_environment import PAIR, STORED, left, spec_of, tags_of
from tests.integration.test_local_environment import CONTEXT, SPEC
from tests.integration.test_receipts import a_job
from tests.recorded import Recording

mounts = pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")
BUSY = "driver failed to remove the root file system: device or resource busy"


def of_instance(instance_id: UUID, settings: Settings) -> Tags:
    return replace(tags_of(settings.installation), instance_id=instance_id)


@contextmanager
def mounted(place: Path) -> Iterator[None]:
    """A file system at a new folder, which then cannot be removed."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


@mounts
def test_an_environment_that_would_not_go_stops_no_other_and_goes_with_the_next_round(
    oci: OciProvider, oci_settings: Settings, tiny: EnvironmentSpec
) -> None:
    dead = uuid.uuid4()
    tags = of_instance(dead, oci_settings)
    made = sorted((oci.create(tiny, tags, timeout_s=30) for _ in range(3)), key=lambda one: one.id)
    sweeper = Sweeper(oci_settings)
    with mounted(oci._site.records.place(made[0].id) / "upper" / "busy"):
        swept = sweeper.sweep(set(), ended={dead})
        assert swept.removed == 2
        (refusal,) = swept.refused
        assert (refusal.kind, refusal.id, refusal.instance_id) == (ObjectKind.ENVIRONMENT, made[0].id, dead)
        assert "would not go" in refusal.why
        assert [record.id for record in oci._site.records.all()] == [made[0].id]
    assert sweeper.sweep(set(), ended={dead}) == Swept(1, ())
    assert left_over(oci_settings.home) == []
    for environment in made:
        environment.destroy()


@mounts
def test_a_folder_that_would_not_go_is_not_said_to_be_gone(settings: Settings, database: Database) -> None:
    job = a_job(database)
    recording = Recording(LocalProvider(settings, fetch_bundle=lambda bundle: CONTEXT), settings, database)
    busy, other = (recording.create(SPEC, job.tags(settings), timeout_s=20) for _ in range(2))
    job.end_instance()
    lead_here(settings)
    rounds = Rounds(settings, database, "here")
    scratch = settings.home / "scratch" / str(job.instance_id)
    scratch.mkdir(parents=True)
    with mounted(settings.home / "local" / busy.id / "busy"), mounted(scratch / "busy"):
        with pytest.raises(EnvironmentFailed, match=r"expected .* to be gone, found some of it there yet"):
            busy.destroy()
        swept = rounds.sweep()
        assert (swept.removed, {refusal.kind for refusal in swept.refused}) == (1, {"folder", "scratch"})
        lines = {line.engine_id: line.destroyed_by for line in of_run(database, job.run_id).objects}
        assert lines == {busy.id: None, other.id: "sweeper"}
        assert not _known_as_swept(database, job.instance_id)
    assert rounds.sweep().removed == 1
    assert not scratch.exists()
    lines = {line.engine_id: line.destroyed_by for line in of_run(database, job.run_id).objects}
    assert lines == {busy.id: "sweeper", other.id: "sweeper"}
    assert _known_as_swept(database, job.instance_id)


def _known_as_swept(database: Database, instance_id: UUID) -> bool:
    return one(database, "SELECT swept_at FROM instances WHERE id = :id", id=instance_id).swept_at is not None


@pytest.fixture
def engine(settings: Settings, docker_engine: str) -> Iterator[Engine]:
    yield engine_of(settings)
    sweep_all(settings)


@pytest.fixture
def proxy(engine: Engine) -> Iterator[EngineProxy]:
    with engine_proxy(engine.url) as found:
        yield found


@pytest.fixture
def plain(settings: Settings, engine: Engine) -> DockerProvider:
    return DockerProvider(settings, fetch_bundle=lambda bundle: b"")


@pytest.fixture
def several(settings: Settings, engine: Engine) -> ComposeProvider:
    return ComposeProvider(settings, fetch_bundle=lambda bundle: STORED[bundle.sha256])


def ids(engine: Engine, settings: Settings) -> set[str]:
    labels = {"label": f"megaflow={settings.installation}"}
    return {str(found["Id"]) for found in engine.api.containers(all=True, filters=labels)}


@pytest.mark.docker
def test_a_container_that_would_not_go_stops_no_other(
    plain: DockerProvider,
    several: ComposeProvider,
    engine: Engine,
    proxy: EngineProxy,
    settings: Settings,
    base_image_tag: str,
) -> None:
    dead = uuid.uuid4()
    project = several.create(spec_of(PAIR.replace("BASE", base_image_tag)), of_instance(dead, settings), timeout_s=60)
    things = project.created_resources()
    single = plain.create(EnvironmentSpec(image=base_image_tag), of_instance(dead, settings), timeout_s=60)
    stuck = engine.api.containers(filters={"label": f"megaflow.instance={dead}"})[0]["Id"]  # the first to be tried
    proxy.refuse_removal(stuck, 500, BUSY)
    sweeper = Sweeper(settings.model_copy(update={"docker_url": proxy.url}))
    swept = sweeper.sweep(set(), ended={dead})
    assert ids(engine, settings) == {stuck}
    (refusal,) = swept.refused
    assert (refusal.kind, refusal.id, refusal.instance_id) == (ObjectKind.CONTAINER, stuck, dead)
    assert BUSY in refusal.why
    proxy.refusals.clear()
    assert sweeper.sweep(set(), ended={dead}).refused == ()
    assert left(engine, settings) == []
    assert swept.removed == len(things.containers) + (2 if stuck == single.id else 0)
    for environment in (single, project):
        environment.destroy()


@pytest.mark.docker
def test_a_network_and_a_volume_that_a_stranger_uses_are_refused_and_the_rest_goes(
    several: ComposeProvider, engine: Engine, settings: Settings, base_image_tag: str
) -> None:
    dead = uuid.uuid4()
    spec = spec_of(PAIR.replace("BASE", base_image_tag))
    used, other = (several.create(spec, of_instance(dead, settings), timeout_s=60) for _ in range(2))
    things = used.created_resources()
    host = engine.api.create_host_config(binds=[f"{things.volumes[0]}:/kept"], network_mode=things.networks[0])
    stranger = engine.api.create_container(base_image_tag, ["sleep", "600"], host_config=host)["Id"]
    sweeper = Sweeper(settings)
    try:
        engine.api.start(stranger)
        swept = sweeper.sweep(set(), ended={dead})
        assert {refusal.id for refusal in swept.refused} == {*things.networks, *things.volumes}
        assert all("in use, and not by its project" in refusal.why for refusal in swept.refused)
        assert (swept.removed, other.created_resources().none) == (6, True)
    finally:
        engine.remove(stranger)
    assert sweeper.sweep(set(), ended={dead}).removed == 2
    assert left(engine, settings) == []
    for environment in (used, other):
        environment.destroy()


@pytest.mark.docker
@pytest.mark.parametrize("leaves", [False, True], ids=["drops-a-call", "leaves"])
def test_an_engine_that_leaves_amid_a_sweep_is_no_refusal_of_each(
    plain: DockerProvider, engine: Engine, proxy: EngineProxy, settings: Settings, base_image_tag: str, leaves: bool
) -> None:
    dead, spec = uuid.uuid4(), EnvironmentSpec(image=base_image_tag)
    made = [plain.create(spec, of_instance(dead, settings), timeout_s=60) for _ in range(2)]
    first = engine.api.containers(filters={"label": f"megaflow.instance={dead}"})[0]["Id"]
    proxy.drop_removal(first, leaves=leaves)
    swept = Sweeper(settings.model_copy(update={"docker_url": proxy.url})).sweep(set(), ended={dead})
    assert (swept.removed, [refusal.id for refusal in swept.refused]) == ((0, []) if leaves else (1, [first]))
    for environment in made:
        environment.destroy()
