"""What most of these tests begin with: settings of their own, the ledger that they name, commands, a registry."""

from __future__ import annotations

from collections.abc import Iterator

import celery as celery_library
import pytest
from celery import Celery

from app.celery_app import build
from app.host.engine import Engine, engine_of
from app.ledger.database import Database
from app.settings import Settings
from tests.integration.command import CommandLine
from tests.integration.docker_fixture import remove_images
from tests.integration.egress_servers import server
from tests.integration.fake_registry import fake, registry
from tests.integration.oci_fixture import oci, oci_cache, oci_programs, oci_settings, own, tiny
from tests.services import MakeSettings

__all__ = ["fake", "oci", "oci_cache", "oci_programs", "oci_settings", "own", "registry", "server", "tiny"]


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings()


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    found = Database(settings.database(), pool_size=10)
    yield found
    found.close()


@pytest.fixture
def megaflow(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """The `megaflow` command on the settings of the test."""
    return CommandLine(settings, monkeypatch)


@pytest.fixture
def celery(settings: Settings) -> Iterator[Celery]:
    """The current application, as in a control worker."""
    before, made = celery_library.current_app._get_current_object(), build(settings)
    made.set_current()
    yield made
    made.close()
    before.set_current()


@pytest.fixture
def engine(settings: Settings) -> Iterator[Engine]:
    """The engine of the settings, without this installation's images afterwards."""
    found = engine_of(settings)
    yield found
    remove_images(found, settings)
