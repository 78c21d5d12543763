"""A pytest plugin that runs the suite on grounds of the command line: `--ground MODULE[:NAME]`, may be repeated."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import pytest

from megaflow.contract.environments.fixtures import *  # noqa: F403
from megaflow.contract.environments.ground import Ground


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ground",
        action="append",
        default=[],
        metavar="MODULE[:NAME]",
        help="where a Ground, or a list of them, stands (NAME: GROUND); the environments' contract runs on each",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "ground" in metafunc.fixturenames:
        grounds = [ground for name in metafunc.config.getoption("--ground") for ground in _grounds(name)]
        if not grounds:
            raise pytest.UsageError("expected --ground MODULE[:NAME], which names what the suite is to run on")
        metafunc.parametrize("ground", [ground.param() for ground in grounds], scope="module")


def _grounds(named: str) -> Sequence[Ground]:
    module, _, name = named.partition(":")
    try:
        value = getattr(importlib.import_module(module), name or "GROUND")
    except (ImportError, AttributeError) as error:
        raise pytest.UsageError(f"expected a Ground at {named!r} (MODULE[:NAME]): {error}") from error
    return [value] if isinstance(value, Ground) else list(value)
