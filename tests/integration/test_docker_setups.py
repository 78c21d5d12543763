"""Set-ups of containers: paid once, kept as images, started from, reset to, and not kept when files are not all."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from app.environments.runtimes.docker.provider import DockerProvider
from app.environments.session import transports
from app.errors import SetupFailed
from app.host.engine import Engine
from app.images.cache import ImageCache
from app.models.spec import EnvironmentSpec, Reuse
from app.settings import Settings
from tests.integration import docker_fixture
from tests.integration.docker_fixture import Create, kept_images, out, provider_of, tags_of

pytestmark = pytest.mark.docker

settings, engine = docker_fixture.settings, docker_fixture.engine
provider, create = docker_fixture.provider, docker_fixture.create


def once() -> str:
    """A set-up command that no other test has; what it leaves differs each time it runs."""
    return f": {uuid.uuid4().hex}; cat /proc/sys/kernel/random/uuid > /etc/made"


def test_environments_that_share_a_set_up_pay_for_it_once(
    provider: DockerProvider, engine: Engine, base_image_tag: str, settings: Settings
) -> None:
    groups = [EnvironmentSpec(image=base_image_tag, setup=(once(), "sleep 0.3")) for _ in range(2)]
    providers = [provider, provider_of(settings)]  # as two processes would

    def made_in(number: int) -> tuple[str, str, float, str]:
        spec = groups[number % 2]
        environment = providers[number // 2 % 2].create(spec, tags_of(settings.installation), timeout_s=60)
        told = environment.describe()
        found = out(environment, "cat /etc/made")
        environment.destroy()
        return spec.setup[0], found, told["phases"]["set_up"], told["path"]

    before = kept_images(engine, settings)
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(made_in, range(8)))
    assert len({(command, found) for command, found, _, _ in results}) == 2
    assert sorted(path for *_, path in results) == ["cold"] * 2 + ["snapshot"] * 6
    assert all((paid == 0) == (path == "snapshot") for *_, paid, path in results)
    assert len(kept_images(engine, settings)) == len(before) + 2
    assert engine.api.containers(all=True, filters={"label": f"megaflow={settings.installation}"}) == []


def test_a_set_up_is_kept_where_each_connection_is_a_process_inside(base_image_tag: str, settings: Settings) -> None:
    provider = DockerProvider(settings, fetch_bundle=lambda bundle: b"", transports=(transports.CopiedHelper,))
    spec = EnvironmentSpec(image=base_image_tag, setup=(once(),))
    for path in ("cold", "snapshot"):
        made = provider.create(spec, tags_of(settings.installation), timeout_s=60)
        assert (made.describe()["path"], made.stats().processes) == (path, 0)
        made.destroy()


def test_what_stands_on_a_set_up_can_be_reset_to_it(create: Create) -> None:
    command = once()
    for number in range(2):
        environment = create(setup=(command,))
        made = out(environment, "cat /etc/made")
        environment.run("echo changed > /etc/made; echo x > /etc/other", timeout_s=20)
        assert environment.reset().clean, number
        assert out(environment, "cat /etc/made") == made
        assert not environment.run("test -e /etc/other", timeout_s=20).ok
        environment.destroy()


@pytest.mark.parametrize(
    "leave",
    [
        "nohup sleep 60 > /dev/null 2>&1 &",
        "echo x > /dev/shm/x",
        "echo x > /dev/x",
        "echo 127.0.0.1 other >> /etc/hosts",
    ],
)
def test_a_set_up_that_leaves_more_than_files_is_run_by_each(
    create: Create, engine: Engine, settings: Settings, leave: str
) -> None:
    before = kept_images(engine, settings)
    setup = (once(), leave)
    first, second = create(setup=setup), create(setup=setup)
    assert out(first, "cat /etc/made") != out(second, "cat /etc/made")
    assert kept_images(engine, settings) == before
    assert second.describe()["path"] == "cold"
    assert second.describe()["phases"]["set_up"] > 0
    assert not first.reset().clean
    with pytest.raises(SetupFailed, match="read-only"):
        create(setup=setup, reuse=Reuse.SHARED_READONLY)


def test_the_image_cache_takes_kept_set_ups_for_its_own(
    create: Create, engine: Engine, settings: Settings, base_image_tag: str
) -> None:
    environment = create(setup=(once(),))
    kept = engine.api.inspect_container(environment.id)["Image"]
    cache = ImageCache(settings, fresh_s=0)
    [here] = [image for image in cache.look().images if image.id == kept]
    assert (here.ours, here.containers, here.keys) == (True, 1, {base_image_tag})
    assert cache.evict(cache.look(), [kept]) == []
    environment.destroy()
    assert cache.evict(cache.look(), [kept]) == list(here.names)
    again = create(setup=environment._spec.setup)
    assert again.describe()["path"] == "cold"
