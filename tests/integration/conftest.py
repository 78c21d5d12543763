"""What most of these tests begin with: settings of their own and the ledger that they name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.ledger.database import Database
from app.settings import Settings
from tests.services import MakeSettings


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings()


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    found = Database(settings.database())
    yield found
    found.close()
