"""The failure taxonomy: no table of an adapter lets a fault count. tests/unit/test_docs.py holds the document to it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from app.agents import FRAMEWORKS, FrameworkOptions, framework_named
from app.agents.external import framework as result
from app.agents.installation import Installer
from app.models.endings import BLAME, Blame, EndReason

OPTIONS = FrameworkOptions(Installer(Path("/"), may_install=False))
TABLES = [
    *(pytest.param(framework_named(name, OPTIONS).endings, id=name) for name in FRAMEWORKS),
    pytest.param(result.ENDINGS, id="external agents"),
]


@pytest.mark.parametrize("endings", TABLES)
def test_every_framework_tells_of_success_and_of_failure(endings: Mapping[str, EndReason]) -> None:
    told = {EndReason.SUBMITTED, EndReason.STEP_LIMIT, EndReason.AGENT_ERROR, EndReason.MODEL_ERROR}
    assert told <= set(endings.values())


@pytest.mark.parametrize("endings", TABLES)
def test_no_framework_says_what_only_we_can_know(endings: Mapping[str, EndReason]) -> None:
    """That somebody cancelled, that a worker was lost, what a grader made of it."""
    ours = {reason for reason, blame in BLAME.items() if blame in (Blame.PERSON, Blame.INTERRUPTION)}
    ours |= {EndReason.LOST, EndReason.DEADLINE, EndReason.GRADING_ERROR}
    assert ours.isdisjoint(endings.values())
