"""The attack suite's range: a ledger of each test's own, real containers; all once more on an engine's (`extra`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.environments.networks import firewall
from app.host.engine import engine_of
from app.ledger.database import Database
from app.settings import Settings
from app.workers import grading
from tests.integration.docker_fixture import remove_images
from tests.security.grading.attacks import Range
from tests.services import MakeSettings, settings_in, short_folder

RUNTIMES = ["auto", "docker"]
"""As the setting has them: the fastest that this host has, which is `oci`, and an engine's containers."""


@pytest.fixture(params=[RUNTIMES[0], pytest.param(RUNTIMES[1], marks=pytest.mark.extra)])
def runtime(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def installation() -> Iterator[Settings]:
    """Of this process: what was pulled and unpacked for one attack is there for the next."""
    with short_folder() as folder:
        settings = settings_in(folder)
        yield settings
        firewall.remove(settings.installation)
        remove_images(engine_of(settings), settings)


@pytest.fixture
def range_of_attacks(
    make_settings: MakeSettings,
    base_image_tag: str,
    monkeypatch: pytest.MonkeyPatch,
    runtime: str,
    installation: Settings,
) -> Iterator[Range]:
    shared = {"home": installation.home, "installation": installation.installation}
    settings = make_settings(container_runtime=runtime, **shared)
    monkeypatch.setattr(grading, "_controls", {})  # what the worker learned from one attack is no help in the next
    database = Database(settings.database())
    yield Range(settings, database, monkeypatch)
    database.close()
