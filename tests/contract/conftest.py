"""Fixtures of the environments' contract suite: every test runs on each of `GROUNDS`."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest

from app.environments.base import Environment, EnvironmentProvider
from app.models.spec import EnvironmentSpec
from app.settings import Settings
from tests.contract.environment_grounds import GROUNDS, Ground, tags_of

Create = Callable[[], Environment]


@pytest.fixture(scope="module", params=[ground.param() for ground in GROUNDS])
def ground(request: pytest.FixtureRequest) -> Ground:
    found: Ground = request.param
    return found


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(home=tmp_path_factory.mktemp("home"), installation=f"test-{uuid.uuid4().hex[:8]}")


@pytest.fixture(scope="module")
def spec(ground: Ground, request: pytest.FixtureRequest) -> EnvironmentSpec:
    return ground.spec(request)


@pytest.fixture(scope="module")
def provider(ground: Ground, settings: Settings) -> Iterator[EnvironmentProvider]:
    made = ground.provider(settings)
    yield made
    made.sweep(installation=settings.installation)


@pytest.fixture(scope="module")
def create(provider: EnvironmentProvider, spec: EnvironmentSpec, settings: Settings) -> Create:
    return lambda: provider.create(spec, tags_of(settings.installation), timeout_s=60)


@pytest.fixture(scope="module")
def shared(create: Create) -> Iterator[Environment]:
    """For tests that leave nothing behind which another could trip over."""
    environment = create()
    yield environment
    environment.destroy()


@pytest.fixture
def own(create: Create) -> Iterator[Environment]:
    environment = create()
    yield environment
    environment.destroy()
