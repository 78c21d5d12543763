"""What the tests of containers share: a provider with a home and an installation of its own, swept at the end."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator

import pytest
from docker.errors import APIError, ImageNotFound

from app.environments.contract import Tags
from app.environments.networks import firewall
from app.environments.runtimes.docker.provider import DockerEnvironment, DockerProvider
from app.environments.runtimes.docker.setups import BASE
from app.host.engine import Engine, engine_of
from app.models.spec import EnvironmentSpec
from app.settings import Settings
from megaflow.contract.environments.fixture import sweep_all

Create = Callable[..., DockerEnvironment]


def tags_of(installation: str, deadline_s: float = 600) -> Tags:
    return Tags(installation, uuid.uuid4(), uuid.uuid4(), uuid.uuid4(), uuid.uuid4(), time.time() + deadline_s)


def out(environment: DockerEnvironment, command: str, timeout_s: float = 30) -> str:
    return environment.run(command, timeout_s=timeout_s).stdout.decode()


def provider_of(settings: Settings) -> DockerProvider:
    return DockerProvider(settings, fetch_bundle=lambda bundle: b"")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, docker_engine: str) -> Settings:
    return Settings(home=tmp_path_factory.mktemp("home"), installation=f"test-{uuid.uuid4().hex[:8]}")


@pytest.fixture(scope="module")
def engine(settings: Settings) -> Engine:
    return engine_of(settings)


@pytest.fixture(scope="module")
def provider(settings: Settings, engine: Engine) -> Iterator[DockerProvider]:
    made = provider_of(settings)
    yield made
    sweep_all(settings)
    firewall.remove(settings.installation)
    remove_images(engine, settings)


def remove_images(engine: Engine, settings: Settings) -> None:
    """All that were made for it; one on which others stand goes after them, in whatever order they are listed."""
    left = {str(found["Id"]) for found in engine.api.images(filters={"label": f"megaflow={settings.installation}"})}
    while left:
        refused = {image: why for image in left if (why := _refusal(engine, image)) is not None}
        if len(refused) == len(left):
            raise next(iter(refused.values()))
        left = set(refused)


def _refusal(engine: Engine, image: str) -> APIError | None:
    """Why it stays; None: it is gone, perhaps with one that stood on it."""
    try:
        engine.api.remove_image(image, force=True)
    except ImageNotFound:
        return None
    except APIError as error:
        return error
    return None


def kept_images(engine: Engine, settings: Settings) -> list[str]:
    """Ids of what set-ups left on the engine."""
    labels = [f"megaflow={settings.installation}", BASE]
    return sorted(str(found["Id"]) for found in engine.api.images(filters={"label": labels}))


@pytest.fixture
def create(provider: DockerProvider, base_image_tag: str, settings: Settings) -> Iterator[Create]:
    made = []

    def make(**fields: object) -> DockerEnvironment:
        spec = EnvironmentSpec.model_validate({"image": base_image_tag, **fields})
        made.append(provider.create(spec, tags_of(settings.installation), timeout_s=60))
        return made[-1]

    yield make
    for environment in made:
        environment.destroy()
