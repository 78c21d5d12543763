"""The agents by name, with what a producer must know of each. Light: imports no framework and no adapter."""

from __future__ import annotations

from dataclasses import dataclass

from app.errors import UnknownName


@dataclass(frozen=True, slots=True)
class Traits:
    """What a task needs in order to be given to this agent."""

    needs_model: bool = False
    needs_solution: bool = False
    summary: str = ""


AGENTS: dict[str, Traits] = {
    "oracle": Traits(needs_solution=True, summary="applies the gold solution"),
    "nop": Traits(summary="does nothing"),
    "mini-swe-agent": Traits(needs_model=True, summary="mini-swe-agent 2.4.6, unmodified"),
}


def traits(name: str) -> Traits:
    """Raises: UnknownName."""
    if name not in AGENTS:
        raise UnknownName.of("agent", name, list(AGENTS))
    return AGENTS[name]
