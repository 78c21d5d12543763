"""The agents by name, with what a producer must know of each. Light: imports no framework and no adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from app.errors import UnknownName


@dataclass(frozen=True, slots=True)
class Traits:
    """What a task needs in order to be given to this agent."""

    needs_model: bool = False
    needs_solution: bool = False
    needs_recording: bool = False
    """Its model's name is `recording:RUN`."""
    writes: bool = True
    """It changes files, so that a read-only environment is none for it."""
    tools: tuple[str, ...] = ()
    """Bundles that its environments have mounted read-only; not empty: the framework runs inside."""
    summary: str = ""


AGENTS: dict[str, Traits] = {
    "oracle": Traits(needs_solution=True, summary="applies the gold solution"),
    "nop": Traits(writes=False, summary="does nothing"),
    "replay": Traits(needs_recording=True, summary="does again what a recorded attempt did, without a model"),
    "mini-swe-agent": Traits(needs_model=True, summary="mini-swe-agent 2.4.6, unmodified; acts from outside"),
    "claude-code": Traits(needs_model=True, tools=("claude-code",), summary="Claude Code 2.1.329, unmodified; inside"),
    "qwen-code": Traits(needs_model=True, tools=("qwen-code",), summary="Qwen Code 0.24.4, unmodified; inside"),
    "openhands": Traits(needs_model=True, tools=("openhands",), summary="OpenHands SDK 1.58.0, unmodified; inside"),
    "swe-agent": Traits(
        needs_model=True, tools=("swe-agent",), summary="SWE-agent from a checkout, unmodified; inside"
    ),
}


def traits(name: str, known: Mapping[str, Traits]) -> Traits:
    """known: `app.agents.external.known_agents`, or `AGENTS` where there are only ours.

    Raises: UnknownName: with the names that are known.
    """
    if name not in known:
        raise UnknownName.of("agent", name, list(known))
    return known[name]
