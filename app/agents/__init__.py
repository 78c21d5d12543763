"""Agents that can work on a task. README.md in this folder says how to add one."""

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
"""Classes by name. Imported only when needed: a worker that never runs an agent may be unable to import it."""


@dataclass(frozen=True, slots=True)
class FrameworkOptions:
    """Options for making adapters on a host."""

    installer: Installer
    call_timeout_s: float = 480.0
    """Timeout of one attempt at a model call, including the time it waits for a limit or a busy inference server."""
    call_attempts: int = 3
    """Attempts of the framework itself at one model call."""
    swe_agent_source: str | None = None
    manifests: Mapping[str, Manifest] = field(default_factory=dict)
    """External agents by name."""
    process_env: Mapping[str, str] = field(default_factory=dict)
    """Additional variables for an agent's process on the worker; never a secret."""


def agent_named(name: str, options: FrameworkOptions) -> Agent:
    """Returns a new agent of that name. Its framework is checked later, by `Agent.check`. Raises: UnknownName."""
    if name in _OURS:
        ours: Agent = resolve_name(_OURS[name])()
        return ours
    if name not in FRAMEWORKS and name not in options.manifests:
        raise UnknownName.of("agent", name, [*AGENTS, *options.manifests])
    from app.agents.running import FrameworkAgent

    return FrameworkAgent(framework_named(name, options), process_env=options.process_env)


def tool_folder(name: str, options: FrameworkOptions) -> Path:
    """Returns the bundle's folder on this host for a framework that runs inside. Installs it if missing and allowed.

    Raises: UnknownName, AgentUnavailable.
    """
    return framework_named(name, options).install().folder


def framework_named(name: str, making: FrameworkOptions) -> Framework:
    """Returns a new adapter of that name, built-in or external; installs nothing yet. Raises: UnknownName."""
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
