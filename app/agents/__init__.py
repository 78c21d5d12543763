"""Agents that can work on a task. README.md beside this file says how to add one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from app.agents.base import Agent
from app.agents.catalogue import AGENTS, traits
from app.agents.external.manifest import Manifest
from app.agents.framework import Framework
from app.agents.installation import Installer
from app.errors import UnknownName

__all__ = ["FRAMEWORKS", "Agent", "FrameworkOptions", "agent_named", "framework_named", "tool_folder", "traits"]

_OURS = {
    "oracle": "app.agents.oracle:OracleAgent",
    "nop": "app.agents.oracle:NopAgent",
    "cheat": "app.agents.cheat:CheatAgent",
    "replay": "app.agents.replay:ReplayAgent",
}
FRAMEWORKS: Mapping[str, str] = {
    "mini-swe-agent": "app.agents.mini_swe_agent.adapter:MiniSweAgent",
    "claude-code": "app.agents.claude_code.adapter:ClaudeCode",
    "qwen-code": "app.agents.qwen_code.adapter:QwenCode",
    "openhands": "app.agents.openhands.adapter:OpenHands",
    "swe-agent": "app.agents.swe_agent.adapter:SweAgent",
}
"""Classes by name. Imported late: a worker that never runs an agent need not be able to import it."""


@dataclass(frozen=True, slots=True)
class FrameworkOptions:
    """What adapters are made with on a host."""

    installer: Installer
    call_timeout_s: float = 480.0
    """One try of a model call, with what a limit or a busy engine makes it wait."""
    call_attempts: int = 3
    """Tries of one model call by the framework itself."""
    swe_agent_source: str | None = None
    manifests: Mapping[str, Manifest] = field(default_factory=dict)
    """External agents by name."""
    process_env: Mapping[str, str] = field(default_factory=dict)
    """Variables that an agent's process outside gets beside its own; never a secret."""


def agent_named(name: str, options: FrameworkOptions) -> Agent:
    """A new agent of that name; its framework is not looked for yet (`Agent.check` does that). Raises: UnknownName."""
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


def framework_named(name: str, making: FrameworkOptions) -> Framework:
    """A new adapter of that name, ours or external; nothing is installed yet. Raises: UnknownName."""
    calls: dict[str, Any] = {"call_timeout_s": making.call_timeout_s, "call_attempts": making.call_attempts}
    if name in making.manifests:
        from app.agents.external.framework import ExternalFramework

        return ExternalFramework(making.manifests[name], making.installer, **calls)
    if name not in FRAMEWORKS:
        raise UnknownName.of("framework", name, [*FRAMEWORKS, *making.manifests])
    if name == "swe-agent":
        calls["source"] = making.swe_agent_source
    adapter: Framework = resolve_name(FRAMEWORKS[name])(making.installer, **calls)
    return adapter
