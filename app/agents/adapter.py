"""The base class of this repository's adapters; the interface of any adapter is in `framework.py`."""

from __future__ import annotations

from typing import ClassVar

from app.agents.framework import FrameworkBundle
from app.agents.installation import Installer, require
from app.agents.task_shell import require_programs
from app.models.shell import Shell


class PinnedAdapter:
    """One object may serve any number of jobs at a time.

    `call_timeout_s` and `call_attempts` bound one call of the model as the framework makes it: what a limit or a busy
    engine makes it wait at the gateway is part of the first.
    """

    name: ClassVar[str]
    needs_model: ClassVar[bool] = True
    programs: ClassVar[tuple[str, ...]] = ("bash",)
    """What it calls inside, which the image has to have."""

    def __init__(self, installer: Installer, *, call_timeout_s: float = 480.0, call_attempts: int = 3) -> None:
        self._installer = installer
        self._call_timeout_s = call_timeout_s
        self._call_attempts = call_attempts

    def install(self) -> FrameworkBundle:
        """Raises: AgentUnavailable."""
        raise NotImplementedError

    def suits(self, shell: Shell) -> None:
        """Raises: AgentUnsuitable: another C library, another architecture, or a program is missing."""
        require(shell, self.install())
        require_programs(shell, self.name, *self.programs)
