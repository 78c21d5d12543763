"""Agents whose adapters live outside this repository; docs/howto/agents.md is the protocol as their authors see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.agents.catalogue import AGENTS, Traits
from app.agents.external.manifest import PROTOCOL, Manifest, read, read_all
from app.agents.framework import Placement

if TYPE_CHECKING:  # the worker image's build has the agents alone
    from app.settings import Settings

__all__ = ["PROTOCOL", "Manifest", "external_manifests", "external_traits", "known_agents", "read"]


def external_manifests(settings: Settings) -> dict[str, Manifest]:
    """The agents of `MEGAFLOW_AGENT_MANIFESTS` by name.

    Raises: SettingsInvalid: a manifest that cannot be read or is wrong, or a name that is used twice.
    """
    return read_all(settings.agent_manifests, taken=AGENTS)


def external_traits(settings: Settings) -> dict[str, Traits]:
    """What a producer must know of them. Raises: SettingsInvalid."""
    return {name: traits_of(manifest) for name, manifest in external_manifests(settings).items()}


def known_agents(settings: Settings) -> dict[str, Traits]:
    """All agents that a task can be given to here, ours first: for `catalogue.traits`. Raises: SettingsInvalid."""
    return AGENTS | external_traits(settings)


def traits_of(manifest: Manifest) -> Traits:
    """What a task needs in order to be given to this agent."""
    return Traits(
        needs_model=manifest.needs_model,
        writes=manifest.writes,
        tools=(manifest.name,) if manifest.placement is Placement.INSIDE else (),
        any_argument=True,
        summary=manifest.summary or f"version {manifest.version}, of {manifest.file.name}",
    )
