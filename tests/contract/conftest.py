"""Runs the environments' contract suite (`megaflow.contract.environments`) on each of our `FIXTURES`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

PARTS = ("commands", "files", "life", "limits", "ports", "shells", "streams", "tools")
pytest.register_assert_rewrite(*(f"megaflow.contract.environments.test_{part}" for part in PARTS))

from megaflow.contract.environments.fixtures import *  # noqa: E402, F403
from megaflow.contract.environments.fixtures import Create as Create  # noqa: E402  other tests take it from here
from tests.contract.environment_fixtures import AT_END, FIXTURES, Fixture  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def _ended() -> Iterator[None]:
    with AT_END:
        yield


@pytest.fixture(scope="module", params=[fixture.param() for fixture in FIXTURES])
def fixture(request: pytest.FixtureRequest) -> Fixture:
    found: Fixture = request.param
    return found
