"""The agents' contract suite (`app.agents.contract`) on ours: every test runs on each of `SUBJECTS`.

Qwen Code's own retries cannot be set and take minutes for each broken engine, OpenHands takes ten seconds to start and
mini-swe-agent five: of these only the tests of `ALWAYS` run, unless AGENTS_IN_FULL is set, as `make test-agents` does.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

PARTS = ("ends", "engine_faults", "stops")
pytest.register_assert_rewrite(*(f"app.agents.contract.test_{part}" for part in PARTS))

from app.agents.contract.fixtures import *  # noqa: E402, F403
from app.agents.contract.subject import Subject, subject_named  # noqa: E402
from tests.contract.agents.example import EXAMPLE  # noqa: E402

NEEDS_INSTALLING = (pytest.mark.agents, pytest.mark.slow, pytest.mark.timeout(900))

SUBJECTS = [
    subject_named(str(EXAMPLE)),
    subject_named("mini-swe-agent", marks=NEEDS_INSTALLING),
    subject_named("claude-code", marks=NEEDS_INSTALLING),
    subject_named("qwen-code", marks=NEEDS_INSTALLING),
    subject_named("openhands", marks=NEEDS_INSTALLING),
]


LONG = ("qwen-code", "openhands", "mini-swe-agent")
ALWAYS = ("solves_the_task", "turns_are_bounded", "context_that_is_too_long", "framework_that_dies", "ending_that_it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("AGENTS_IN_FULL"):
        return
    left_out = [
        item
        for item in items
        if "contract/agents" in item.nodeid
        and any(name in item.name for name in LONG)
        and not any(part in item.name for part in ALWAYS)
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="module", params=[subject.param() for subject in SUBJECTS])
def subject(request: pytest.FixtureRequest) -> Subject:
    found: Subject = request.param
    return found


@pytest.fixture(scope="session")
def tools() -> Path:
    """Kept between test runs: half a gigabyte for each, addressed by its lock file."""
    return Path(tempfile.gettempdir()) / f"megaflow-test-tools-{os.getuid()}"
