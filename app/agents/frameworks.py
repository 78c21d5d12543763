"""Makes the adapter of a framework by its name. Imports each of them late."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

from app.agents.external.manifest import Manifest
from app.agents.framework import Framework
from app.agents.installation import Installer
from app.errors import UnknownName


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


FRAMEWORKS: Mapping[str, str] = {
    "mini-swe-agent": "app.agents.mini_swe_agent.adapter:MiniSweAgent",
    "claude-code": "app.agents.claude_code.adapter:ClaudeCode",
    "qwen-code": "app.agents.qwen_code.adapter:QwenCode",
    "openhands": "app.agents.openhands.adapter:OpenHands",
    "swe-agent": "app.agents.swe_agent.adapter:SweAgent",
}
"""The adapters' classes by the framework's name."""


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
