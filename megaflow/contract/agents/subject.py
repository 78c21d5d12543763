"""Defines the subject of the suite: one framework's adapter, and how to create it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.agents import FrameworkOptions, framework_named
from app.agents.external import read
from app.agents.framework import Framework
from app.agents.installation import Installer

CALL_TIMEOUT_S = 6.0
CALL_ATTEMPTS = 2


@dataclass(frozen=True)
class Subject:
    """An adapter. `make` gets the folder for installed frameworks; model calls must be tried twice, 6 s each."""

    name: str
    make: Callable[[Path], Framework]
    marks: tuple[pytest.MarkDecorator, ...] = ()

    def param(self) -> object:
        return pytest.param(self, id=self.name, marks=self.marks)


def subject_named(
    name: str, *, swe_agent_source: str | None = None, marks: tuple[pytest.MarkDecorator, ...] = ()
) -> Subject:
    """Returns a built-in agent, or the external one of a manifest. Raises: SettingsInvalid: no manifest."""
    manifests = {}
    if name.endswith(".toml"):
        manifest = read(Path(name))
        manifests, name = {manifest.name: manifest}, manifest.name

    def make(tools: Path) -> Framework:
        making = FrameworkOptions(
            Installer(tools),
            call_timeout_s=CALL_TIMEOUT_S,
            call_attempts=CALL_ATTEMPTS,
            swe_agent_source=swe_agent_source,
            manifests=manifests,
        )
        return framework_named(name, making)

    return Subject(name, make, marks)
