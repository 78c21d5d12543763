"""A pytest plugin that runs the suite on fixtures of the command line: `--fixture MODULE[:NAME]`, may be repeated."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import pytest

from megaflow.contract.environments.fixture import Fixture
from megaflow.contract.environments.fixtures import *  # noqa: F403


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fixture",
        action="append",
        default=[],
        metavar="MODULE[:NAME]",
        help="a Fixture, or a list of them (NAME: FIXTURES); the environments' contract runs on each",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fixture" in metafunc.fixturenames:
        fixtures = [fixture for name in metafunc.config.getoption("--fixture") for fixture in _fixtures(name)]
        if not fixtures:
            raise pytest.UsageError("expected --fixture MODULE[:NAME], which names what the suite is to run on")
        metafunc.parametrize("fixture", [fixture.param() for fixture in fixtures], scope="module")


def _fixtures(named: str) -> Sequence[Fixture]:
    module, _, name = named.partition(":")
    try:
        value = getattr(importlib.import_module(module), name or "FIXTURES")
    except (ImportError, AttributeError) as error:
        raise pytest.UsageError(f"expected a Fixture at {named!r} (MODULE[:NAME]): {error}") from error
    return [value] if isinstance(value, Fixture) else list(value)
