"""Fixtures for all tests: the real services come from `tests.services`."""

import asyncio
import inspect

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.integration import rows

pytest_plugins = ["tests.services"]
hypothesis.settings.register_profile("busy machine", deadline=None)
hypothesis.settings.load_profile("busy machine")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**given), 150))
    return True


class _ByFile(LoadFileScheduling):
    """Sends each file to one process, and acceptance tests, which share a whole system, together. Attacks on grading,
    which share no state and take long, go one by one.
    """

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        folder = file.rpartition("/test_")[0]
        if folder == "tests/acceptance":
            return folder
        return nodeid if folder == "tests/security/grading" else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Those of `make test`; the long ones have systems of their own."""
    return _ByFile(config, log) if config.option.markexpr == "not extra" else None


@pytest.fixture(autouse=True)
def _now() -> None:
    """A row is as young as its test says, however long the session has been going on."""
    rows.begin()
