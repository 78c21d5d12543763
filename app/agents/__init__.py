"""The agents that a task can be given. To add one, see README.md beside this file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from app.agents.base import Agent
from app.agents.catalogue import AGENTS, traits

__all__ = ["Agent", "Workshop", "agent_named", "agent_names"]


@dataclass(frozen=True, slots=True)
class Workshop:
    """What a host offers to the frameworks that run on it."""

    tools: Path
    """Folder of the frameworks' own environments; made when needed."""
    model_timeout_s: float = 120.0
    process_env: Mapping[str, str] = field(default_factory=dict)
    """Variables that an agent's process gets beside its own; never a secret."""


def _oracle(_: Workshop) -> Agent:
    from app.agents.oracle import OracleAgent

    return OracleAgent()


def _nop(_: Workshop) -> Agent:
    from app.agents.nop import NopAgent

    return NopAgent()


def _mini_swe_agent(workshop: Workshop) -> Agent:
    from app.agents.mini_swe_agent.adapter import MiniSweAgent

    return MiniSweAgent(workshop.tools, model_timeout_s=workshop.model_timeout_s, process_env=workshop.process_env)


# Imported late: a worker that never runs an agent need not be able to import it.
_MAKERS: dict[str, Callable[[Workshop], Agent]] = {
    "oracle": _oracle,
    "nop": _nop,
    "mini-swe-agent": _mini_swe_agent,
}


def agent_named(name: str, workshop: Workshop) -> Agent:
    """A new agent of that name; its framework is not looked for yet (`Agent.check` does that).

    Raises: UnknownName.
    """
    traits(name)
    return _MAKERS[name](workshop)


def agent_names() -> list[str]:
    """Every known agent, sorted."""
    return sorted(AGENTS)
