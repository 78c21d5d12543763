"""Makes the adapter of a framework by its name. Imports each of them late."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from app.agents.external.manifest import Manifest
from app.agents.framework import Framework
from app.agents.installation import Installer
from app.errors import UnknownName


@dataclass(frozen=True, slots=True)
class FrameworkOptions:
    """What adapters are made with."""

    installer: Installer
    call_timeout_s: float = 480.0
    """One try of a model call, with what a limit or a busy engine makes it wait."""
    call_attempts: int = 3
    """Tries of one model call by the framework itself."""
    swe_agent_source: str | None = None
    manifests: Mapping[str, Manifest] = field(default_factory=dict)
    """External agents by name."""


def _mini_swe_agent(making: FrameworkOptions) -> Framework:
    from app.agents.mini_swe_agent.adapter import MiniSweAgent

    return MiniSweAgent(making.installer, call_timeout_s=making.call_timeout_s, call_attempts=making.call_attempts)


def _claude_code(making: FrameworkOptions) -> Framework:
    from app.agents.claude_code.adapter import ClaudeCode

    return ClaudeCode(making.installer, call_timeout_s=making.call_timeout_s, call_attempts=making.call_attempts)


def _qwen_code(making: FrameworkOptions) -> Framework:
    from app.agents.qwen_code.adapter import QwenCode

    return QwenCode(making.installer, call_timeout_s=making.call_timeout_s, call_attempts=making.call_attempts)


def _openhands(making: FrameworkOptions) -> Framework:
    from app.agents.openhands.adapter import OpenHands

    return OpenHands(making.installer, call_timeout_s=making.call_timeout_s, call_attempts=making.call_attempts)


def _swe_agent(making: FrameworkOptions) -> Framework:
    from app.agents.swe_agent.adapter import SweAgent

    return SweAgent(
        making.installer,
        making.swe_agent_source,
        call_timeout_s=making.call_timeout_s,
        call_attempts=making.call_attempts,
    )


FRAMEWORKS: Mapping[str, Callable[[FrameworkOptions], Framework]] = {
    "mini-swe-agent": _mini_swe_agent,
    "claude-code": _claude_code,
    "qwen-code": _qwen_code,
    "openhands": _openhands,
    "swe-agent": _swe_agent,
}


def framework_named(name: str, making: FrameworkOptions) -> Framework:
    """A new adapter of that name, ours or external; nothing is installed yet. Raises: UnknownName."""
    if name in making.manifests:
        from app.agents.external.framework import ExternalFramework

        return ExternalFramework(
            making.manifests[name],
            making.installer,
            call_timeout_s=making.call_timeout_s,
            call_attempts=making.call_attempts,
        )
    if name not in FRAMEWORKS:
        raise UnknownName.of("framework", name, [*FRAMEWORKS, *making.manifests])
    return FRAMEWORKS[name](making)
