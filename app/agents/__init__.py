"""The agents that a task can be given, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from app.agents.base import Agent
from app.errors import UnknownName

__all__ = ["Agent", "agent_named", "agent_names", "factories"]


def _oracle() -> Agent:
    from app.agents.oracle import OracleAgent

    return OracleAgent()


def _nop() -> Agent:
    from app.agents.nop import NopAgent

    return NopAgent()


def _mini_swe_agent() -> Agent:
    # By its module's name: a worker that never runs this agent need not be able to import it.
    from importlib import import_module

    return cast("Agent", import_module("app.agents.mini_swe_agent.adapter").MiniSweAgent())


factories: dict[str, Callable[[], Agent]] = {"oracle": _oracle, "nop": _nop, "mini-swe-agent": _mini_swe_agent}
"""How each agent is made. Whoever knows more about an installation (its folders, say) may put its own maker here."""


def agent_named(name: str) -> Agent:
    """A new agent of that name; its framework is not looked for yet (`Agent.check` does that).

    Raises: UnknownName.
    """
    if name not in factories:
        raise UnknownName.of("agent", name, agent_names())
    return factories[name]()


def agent_names() -> list[str]:
    """Every known agent, sorted."""
    return sorted(factories)
