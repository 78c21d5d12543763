"""Fixtures for all tests: the real services come from `tests.services`."""

import pytest

from tests.integration import rows

pytest_plugins = ["tests.services"]


@pytest.fixture(autouse=True)
def _now() -> None:
    """A row is as young as its test says, however long the session has been going on."""
    rows.begin()
