"""Fixtures of the suite. They need the fixture `fixture` of its user; tests of missing abilities are skipped."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest

from app.environments.contract import Environment, EnvironmentProvider
from app.models.spec import EnvironmentSpec
from app.settings import Settings
from megaflow.contract.environments.fixture import Fixture, sweep_all, tags_of

__all__ = [
    "create",
    "own",
    "provider",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "settings",
    "shared",
    "spec",
]

Create = Callable[[], Environment]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(ability): skipped where the fixture says that it has not got it")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests of an ability that the fixture lacks: `needs("has_terminals")` names a field of `Fixture`."""
    for item in items:
        fixture = getattr(item, "callspec", None) and item.callspec.params.get("fixture")  # type: ignore[attr-defined]
        for mark in item.iter_markers("needs"):
            if isinstance(fixture, Fixture) and not getattr(fixture, mark.args[0]):
                item.add_marker(pytest.mark.skip(reason=f"the fixture {fixture.name} says: not {mark.args[0]}"))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(home=tmp_path_factory.mktemp("home"), installation=f"test-{uuid.uuid4().hex[:8]}")


@pytest.fixture(scope="module")
def spec(fixture: Fixture, request: pytest.FixtureRequest) -> EnvironmentSpec:
    return fixture.spec(request)


@pytest.fixture(scope="module")
def provider(fixture: Fixture, settings: Settings) -> Iterator[EnvironmentProvider]:
    fixture_provider = fixture.provider(settings)
    yield fixture_provider
    sweep_all(fixture.settings(settings))


@pytest.fixture(scope="module")
def create(provider: EnvironmentProvider, spec: EnvironmentSpec, settings: Settings) -> Create:
    return lambda: provider.create(spec, tags_of(settings.installation), timeout_s=60)


@pytest.fixture(scope="module")
def shared(create: Create) -> Iterator[Environment]:
    """Environment for tests that leave nothing which could disturb other tests."""
    environment = create()
    yield environment
    environment.destroy()


@pytest.fixture
def own(create: Create) -> Iterator[Environment]:
    environment = create()
    yield environment
    environment.destroy()
