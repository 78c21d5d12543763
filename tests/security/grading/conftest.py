"""The attack suite's range: a ledger of its own, real containers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.environments.networks import firewall
from app.host.engine import engine_of
from app.ledger.database import Database
from tests.integration.docker_ground import remove_images
from tests.security.grading.attacks import Range
from tests.services import MakeSettings


@pytest.fixture
def range_of_attacks(
    make_settings: MakeSettings, base_image_tag: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Range]:
    settings = make_settings()
    database = Database(settings.database())
    yield Range(settings, database, monkeypatch)
    database.close()
    firewall.remove(settings.installation)
    remove_images(engine_of(settings), settings)
