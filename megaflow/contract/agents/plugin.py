"""A pytest plugin that runs the suite on agents of the command line: `--agent NAME`, may be repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import MegaFlowError
from app.settings import Settings
from megaflow.contract.agents.fixtures import *  # noqa: F403
from megaflow.contract.agents.subject import subject_named


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--agent",
        action="append",
        default=[],
        metavar="NAME|FILE.toml",
        help="an agent of MegaFlow, or the manifest of an external one; the agents' contract runs on each",
    )
    parser.addoption("--tools", type=Path, default=None, metavar="DIR", help="where frameworks are installed")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject" in metafunc.fixturenames:
        named = metafunc.config.getoption("--agent")
        if not named:
            raise pytest.UsageError("expected --agent NAME or --agent FILE.toml: what the suite is to run on")
        try:
            subjects = [subject_named(name, swe_agent_source=Settings().swe_agent_source) for name in named]
        except MegaFlowError as error:
            raise pytest.UsageError(str(error)) from error
        metafunc.parametrize("subject", [subject.param() for subject in subjects], scope="module")


@pytest.fixture(scope="session")
def tools(pytestconfig: pytest.Config) -> Path:
    folder: Path | None = pytestconfig.getoption("--tools")
    return folder or Settings().tools
