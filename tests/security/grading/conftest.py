"""The attack suite's range: a ledger of its own, real containers; all of it once more on an engine's (`extra`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.environments.networks import firewall
from app.host.engine import engine_of
from app.ledger.database import Database
from tests.integration.docker_fixture import remove_images
from tests.security.grading.attacks import Range
from tests.services import MakeSettings

RUNTIMES = ["auto", "docker"]
"""As the setting has them: the fastest that this host has, which is `oci`, and an engine's containers."""


@pytest.fixture(params=[RUNTIMES[0], pytest.param(RUNTIMES[1], marks=pytest.mark.extra)])
def runtime(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def range_of_attacks(
    make_settings: MakeSettings, base_image_tag: str, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> Iterator[Range]:
    settings = make_settings(container_runtime=runtime)
    database = Database(settings.database())
    yield Range(settings, database, monkeypatch)
    database.close()
    firewall.remove(settings.installation)
    remove_images(engine_of(settings), settings)
