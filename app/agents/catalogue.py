"""Lists the agents by name, with what a producer must know of each. Imports no framework and no adapter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from app.agents.attacks import ATTACKS
from app.errors import OptionInvalid, UnknownName


@dataclass(frozen=True, slots=True)
class Argument:
    """A key that an agent accepts (`--agent-arg KEY=VALUE`). `values`: a pattern that the whole value must match."""

    help: str
    values: str = r"(?s).+"


@dataclass(frozen=True, slots=True)
class Traits:
    """Requirements of an agent on its tasks."""

    needs_model: bool = False
    needs_solution: bool = False
    needs_recording: bool = False
    """Whether its model's name is `recording:RUN`."""
    writes: bool = True
    """Whether it changes files, and so cannot use a read-only environment."""
    tools: tuple[str, ...] = ()
    """Bundles that its environments mount read-only; not empty: the framework runs inside."""
    summary: str = ""
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    """Accepted keys of `--agent-arg`."""
    needs_isolation: bool = False
    """Whether it does harm and must never run without a container."""
    any_argument: bool = False
    """Whether it accepts every key: only its own program knows their meaning."""


AGENTS: dict[str, Traits] = {
    "oracle": Traits(needs_solution=True, summary="applies the gold solution"),
    "nop": Traits(writes=False, summary="does nothing"),
    "cheat": Traits(
        needs_isolation=True,
        summary="attacks its own grading; must get 0",
        arguments={
            "attack": Argument(f"one of {', '.join(ATTACKS)}; default: all that fit together", "|".join(ATTACKS))
        },
    ),
    "replay": Traits(needs_recording=True, summary="does again what a recorded attempt did, without a model"),
    "mini-swe-agent": Traits(
        needs_model=True,
        summary="mini-swe-agent 2.4.6, unmodified; acts from outside",
        arguments={
            "config": Argument(
                "its configuration: mini (default), or mini_textbased for a model that calls no tools",
                "mini|mini_textbased",
            )
        },
    ),
    "claude-code": Traits(
        needs_model=True,
        tools=("claude-code",),
        summary="Claude Code 2.1.329, unmodified; inside",
        arguments={
            "append_system_prompt": Argument("text after its system prompt"),
            "max_thinking_tokens": Argument("tokens of thinking in one turn; 0: it does not think", r"\d{1,7}"),
        },
    ),
    "qwen-code": Traits(needs_model=True, tools=("qwen-code",), summary="Qwen Code 0.24.4, unmodified; inside"),
    "openhands": Traits(needs_model=True, tools=("openhands",), summary="OpenHands SDK 1.58.0, unmodified; inside"),
    "swe-agent": Traits(
        needs_model=True, tools=("swe-agent",), summary="SWE-agent from a checkout, unmodified; inside"
    ),
}


def traits(name: str, known: Mapping[str, Traits]) -> Traits:
    """Returns the traits of an agent. known: `app.agents.external.known_agents`, or `AGENTS` for the built-in ones.

    Raises: UnknownName: with the known names.
    """
    if name not in known:
        raise UnknownName.of("agent", name, list(known))
    return known[name]


def check_arguments(name: str, about: Traits, given: Mapping[str, str]) -> None:
    """Raises: OptionInvalid: a key that the agent does not accept, or a value that the key does not accept."""
    if about.any_argument:
        return
    for key, value in given.items():
        known = about.arguments.get(key)
        if known is None:
            keys = ", ".join(sorted(about.arguments))
            near = get_close_matches(key, about.arguments, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise OptionInvalid(
                f"agent argument {key!r}: agent {name!r} takes {f'the keys {keys}' if keys else 'no arguments'}{hint}"
                " (`megaflow agents list`); nothing was submitted"
            )
        if not re.fullmatch(known.values, value, re.ASCII):
            raise OptionInvalid(
                f"agent argument {key!r} of agent {name!r}: expected {known.help}; found {value[:80]!r};"
                " nothing was submitted"
            )
