"""The agents' contract suite (`megaflow.contract.agents`) on ours: every test runs on each of `SUBJECTS`.

Qwen Code's own retries cannot be set and take minutes for each broken engine, OpenHands takes ten seconds to start and
mini-swe-agent five: of these only the tests of `ALWAYS` run, on mini-swe-agent; the others are `extra`
(`make test-extra`).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

PARTS = ("ends", "engine_faults", "stops")
pytest.register_assert_rewrite(*(f"megaflow.contract.agents.test_{part}" for part in PARTS))

from megaflow.contract.agents.fixtures import *  # noqa: E402, F403
from megaflow.contract.agents.subject import Subject, subject_named  # noqa: E402
from tests.contract.agents.example import EXAMPLE  # noqa: E402

NEEDS_INSTALLING = (pytest.mark.agents, pytest.mark.timeout(900))

SUBJECTS = [
    subject_named(str(EXAMPLE)),
    subject_named("mini-swe-agent", marks=NEEDS_INSTALLING),
    subject_named("claude-code", marks=NEEDS_INSTALLING),
    subject_named("qwen-code", marks=NEEDS_INSTALLING),
    subject_named("openhands", marks=NEEDS_INSTALLING),
]


LONG = ("claude-code", "qwen-code", "openhands", "mini-swe-agent")
ALWAYS = ("solves_the_task", "context_that_is_too_long", "ending_that_it")


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        ours = "contract/agents" in item.nodeid and any(name in item.name for name in LONG)
        always = ALWAYS if LONG[-1] in item.name else ()
        if ours and not any(part in item.name for part in always):
            item.add_marker(pytest.mark.extra)


@pytest.fixture(scope="module", params=[subject.param() for subject in SUBJECTS])
def subject(request: pytest.FixtureRequest) -> Subject:
    found: Subject = request.param
    return found


@pytest.fixture(scope="session")
def tools() -> Path:
    """Kept between test runs: half a gigabyte for each, addressed by its lock file."""
    return Path(tempfile.gettempdir()) / f"megaflow-test-tools-{os.getuid()}"
