"""Fixtures for all tests: the real services come from `tests.services`."""

pytest_plugins = ["tests.services"]
