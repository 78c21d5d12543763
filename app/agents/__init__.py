"""Agents that can work on a task. README.md beside this file says how to add one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name

from app.agents.base import Agent
from app.agents.catalogue import AGENTS, traits
from app.agents.external.manifest import Manifest
from app.agents.frameworks import FRAMEWORKS, FrameworkOptions, framework_named
from app.agents.installation import Installer
from app.errors import UnknownName

__all__ = ["Agent", "AgentHost", "agent_named", "agent_names", "tool_folder", "traits"]


@dataclass(frozen=True, slots=True)
class AgentHost:
    """What a host offers to the frameworks that run on it."""

    tools: Path
    """Folder of the frameworks' bundles; made when needed."""
    call_timeout_s: float = 480.0
    """One try of a model call, with what a limit or a busy engine makes it wait."""
    process_env: Mapping[str, str] = field(default_factory=dict)
    """Variables that an agent's process outside gets beside its own; never a secret."""
    manifests: Mapping[str, Manifest] = field(default_factory=dict)
    """External agents by name."""
    swe_agent_source: str | None = None
    may_install: bool = True
    ready_tools: Path | None = None
    """Further bundles, which are not written to."""

    def making(self) -> FrameworkOptions:
        """What adapters are made with here."""
        return FrameworkOptions(
            Installer(self.tools, may_install=self.may_install, ready=self.ready_tools),
            call_timeout_s=self.call_timeout_s,
            swe_agent_source=self.swe_agent_source,
            manifests=self.manifests,
        )


_OURS = {
    "oracle": "app.agents.oracle:OracleAgent",
    "nop": "app.agents.nop:NopAgent",
    "replay": "app.agents.replay:ReplayAgent",
}
"""Their classes. Imported late: a worker that never runs an agent need not be able to import it."""


def agent_named(name: str, host: AgentHost) -> Agent:
    """A new agent of that name; its framework is not looked for yet (`Agent.check` does that).

    Raises: UnknownName.
    """
    if name in _OURS:
        ours: Agent = resolve_name(_OURS[name])()
        return ours
    if name not in FRAMEWORKS and name not in host.manifests:
        raise UnknownName.of("agent", name, [*AGENTS, *host.manifests])
    from app.agents.running import FrameworkAgent

    return FrameworkAgent(framework_named(name, host.making()), process_env=host.process_env)


def tool_folder(name: str, host: AgentHost) -> Path:
    """The bundle of a framework that acts inside, on this host; installed now if it may be and is not there.

    Raises: UnknownName, AgentUnavailable.
    """
    return framework_named(name, host.making()).install().folder


def agent_names() -> list[str]:
    """Every built-in agent, sorted."""
    return sorted(AGENTS)
