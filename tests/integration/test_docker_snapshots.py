"""Snapshots of containers: images that name their owner, are no image's in the cache, and go when they should."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import pytest

from app.environments.contract import Snapshot, Tags
from app.environments.runtimes.docker import snapshots
from app.environments.runtimes.docker.provider import DockerProvider
from app.environments.sweeper import Sweeper
from app.errors import EnvironmentFailed
from app.host.engine import Engine
from app.images.cache import ImageCache
from app.models.spec import EnvironmentSpec
from app.settings import Settings
from tests.integration import docker_ground
from tests.integration.docker_ground import Create, out, tags_of
from tests.integration.test_docker_environment import derived_image

pytestmark = pytest.mark.docker

settings, engine = docker_ground.settings, docker_ground.engine
provider, create = docker_ground.provider, docker_ground.create


@pytest.fixture
def spec(base_image_tag: str) -> EnvironmentSpec:
    return EnvironmentSpec(image=base_image_tag)


@pytest.fixture(autouse=True)
def nothing_left(provider: DockerProvider, engine: Engine, settings: Settings) -> Iterator[None]:
    yield
    provider.sweep(installation=settings.installation)
    assert kept_ids(engine, settings) == []


def kept_ids(engine: Engine, settings: Settings) -> list[str]:
    return [one.id for one in snapshots.listed(engine, settings.installation)]


def _owner(engine: Engine, container_id: str) -> uuid.UUID:
    return uuid.UUID(engine.api.inspect_container(container_id)["Config"]["Labels"]["megaflow.instance"])


def ahead(settings: Settings, deadline_s: float = 600) -> Tags:
    return Tags.without_attempt(settings.installation, uuid.uuid4(), time.time() + deadline_s)


def test_the_sweeper_takes_those_of_the_dead_and_the_overdue(
    provider: DockerProvider, create: Create, engine: Engine, settings: Settings
) -> None:
    environment = create()
    alive, dead = tags_of(settings.installation), tags_of(settings.installation)
    tags = (alive, dead, tags_of(settings.installation, -1), ahead(settings), ahead(settings, -1))
    kept, *_, nobodys, _ = [environment.snapshot(one) for one in tags]
    live = {one.instance_id for one in tags if one is not dead} | {_owner(engine, environment.id)}
    assert Sweeper(settings).sweep(live, ended=[dead.instance_id]).removed == 3
    assert sorted(kept_ids(engine, settings)) == sorted([kept.id, nobodys.id])
    assert Sweeper(settings).sweep(live).removed == 0


def test_what_something_stands_on_loses_its_name_and_goes_with_the_next_sweep_after_it(
    provider: DockerProvider, create: Create, engine: Engine, settings: Settings, spec: EnvironmentSpec
) -> None:
    snapshot = create().snapshot(tags_of(settings.installation, -1))
    owner = tags_of(settings.installation)
    made = provider.create_from(snapshot, spec, owner, timeout_s=60)
    live = {owner.instance_id}
    Sweeper(settings).sweep(live)
    assert kept_ids(engine, settings) == [""]
    assert made.run("true", timeout_s=20).ok
    assert made.reset().clean
    made.destroy()
    Sweeper(settings).sweep(live)
    assert kept_ids(engine, settings) == []


def test_labels_of_a_snapshot_are_not_those_of_what_stands_on_it(
    provider: DockerProvider, create: Create, engine: Engine, settings: Settings, spec: EnvironmentSpec
) -> None:
    environment = create(setup=("echo made > /etc/made",))
    snapshot = environment.snapshot(ahead(settings))
    owner = tags_of(settings.installation)
    made = provider.create_from(snapshot, spec, owner, timeout_s=60)
    labels = engine.api.inspect_container(made.id)["Config"]["Labels"]
    assert {name: labels[name] for name in owner.labels()} == owner.labels()
    assert out(made, "cat /etc/made") == "made\n"
    live = {_owner(engine, environment.id)}
    assert Sweeper(settings).sweep(live, ended=[owner.instance_id]).removed == 1, "it was made for somebody"
    with pytest.raises(EnvironmentFailed):
        made.run("true", timeout_s=20)
    made.destroy()


def test_an_environment_with_a_volume_is_refused(
    create: Create, engine: Engine, settings: Settings, base_image_tag: str
) -> None:
    with derived_image(engine, base_image_tag, "VOLUME /data") as tag:
        environment = create(image=tag)
        with pytest.raises(EnvironmentFailed, match="volume at /data"):
            environment.snapshot(tags_of(settings.installation))
        assert environment.run("true", timeout_s=20).ok
        environment.destroy()


def test_a_persons_image_of_what_stands_on_a_snapshot_stays(
    provider: DockerProvider, create: Create, engine: Engine, settings: Settings, spec: EnvironmentSpec
) -> None:
    snapshot = create().snapshot(tags_of(settings.installation))
    made = provider.create_from(snapshot, spec, tags_of(settings.installation), timeout_s=60)
    name = f"somebodys-{uuid.uuid4().hex[:8]}"
    theirs = engine.api.commit(made.id, repository=name, tag="1")["Id"]
    try:
        made.destroy()
        assert snapshot.id in provider.sweep(installation=settings.installation)
        assert provider.sweep(installation=settings.installation) == []
        assert engine.api.inspect_image(theirs)["RepoTags"] == [f"{name}:1"]
    finally:
        engine.api.remove_image(theirs, force=True)


def test_the_image_cache_leaves_them_to_their_owners(
    provider: DockerProvider, create: Create, engine: Engine, settings: Settings, spec: EnvironmentSpec
) -> None:
    snapshot = create().snapshot(tags_of(settings.installation))
    image_id = snapshots.find(engine, snapshot)
    view = ImageCache(settings, fresh_s=0).look()
    [here] = [image for image in view.images if image.id == image_id]
    assert not here.ours
    assert image_id not in view.victims(1 << 60, time.time(), 0)


def test_a_snapshot_that_cannot_be_made_leaves_nothing(create: Create, engine: Engine, settings: Settings) -> None:
    environment = create()
    engine.remove(environment.id)
    with pytest.raises(EnvironmentFailed, match="snapshot"):
        environment.snapshot(tags_of(settings.installation))
    assert kept_ids(engine, settings) == []


def test_one_of_another_kind_is_told_from_one_that_is_gone(
    provider: DockerProvider, settings: Settings, spec: EnvironmentSpec
) -> None:
    for kind, why in (("oci", "expected a snapshot of the kind 'docker'"), ("docker", "is gone")):
        with pytest.raises(EnvironmentFailed, match=why):
            provider.create_from(Snapshot(kind, "x", "y"), spec, tags_of(settings.installation), timeout_s=20)
