"""What most of these tests begin with: settings of their own and the ledger that they name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.host.engine import Engine, engine_of
from app.ledger.database import Database
from app.settings import Settings
from tests.integration.docker_ground import remove_images
from tests.services import MakeSettings


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings()


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    found = Database(settings.database(), pool_size=10)
    yield found
    found.close()


@pytest.fixture
def engine(settings: Settings) -> Iterator[Engine]:
    """The engine of the settings, without this installation's images afterwards."""
    found = engine_of(settings)
    yield found
    remove_images(found, settings)
