"""Agents that can work on a task. README.md beside this file says how to add one."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name

from app.agents.base import Agent
from app.agents.catalogue import AGENTS, traits
from app.agents.frameworks import FRAMEWORKS, FrameworkOptions, framework_named
from app.errors import UnknownName

__all__ = ["Agent", "FrameworkOptions", "agent_named", "agent_names", "tool_folder", "traits"]


_OURS = {
    "oracle": "app.agents.oracle:OracleAgent",
    "nop": "app.agents.nop:NopAgent",
    "cheat": "app.agents.cheat:CheatAgent",
    "replay": "app.agents.replay:ReplayAgent",
}
"""Their classes. Imported late: a worker that never runs an agent need not be able to import it."""


def agent_named(name: str, options: FrameworkOptions) -> Agent:
    """A new agent of that name; its framework is not looked for yet (`Agent.check` does that).

    Raises: UnknownName.
    """
    if name in _OURS:
        ours: Agent = resolve_name(_OURS[name])()
        return ours
    if name not in FRAMEWORKS and name not in options.manifests:
        raise UnknownName.of("agent", name, [*AGENTS, *options.manifests])
    from app.agents.running import FrameworkAgent

    return FrameworkAgent(framework_named(name, options), process_env=options.process_env)


def tool_folder(name: str, options: FrameworkOptions) -> Path:
    """The bundle of a framework that acts inside, on this host; installed now if it may be and is not there.

    Raises: UnknownName, AgentUnavailable.
    """
    return framework_named(name, options).install().folder


def agent_names() -> list[str]:
    """Every built-in agent, sorted."""
    return sorted(AGENTS)
