"""Agents whose adapters live outside this repository; docs/howto/agents.md defines the protocol for their authors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.agents.catalogue import AGENTS, Traits
from app.agents.external.manifest import PROTOCOL, Manifest, read, read_all
from app.agents.framework import Placement

if TYPE_CHECKING:  # the worker image contains only the agents
    from app.settings import Settings

__all__ = ["PROTOCOL", "Manifest", "external_manifests", "external_traits", "known_agents", "read"]


def external_manifests(settings: Settings) -> dict[str, Manifest]:
    """Returns the agents of `MEGAFLOW_AGENT_MANIFESTS` by name.

    Raises: SettingsInvalid: a manifest that cannot be read or is wrong, or a name that is used twice.
    """
    return read_all(settings.agent_manifests, taken=AGENTS)


def external_traits(settings: Settings) -> dict[str, Traits]:
    """Returns the external agents' traits, as a producer needs them. Raises: SettingsInvalid."""
    return {name: traits_of(manifest) for name, manifest in external_manifests(settings).items()}


def known_agents(settings: Settings) -> dict[str, Traits]:
    """Returns all agents that a task can use here, built-in ones first. Raises: SettingsInvalid."""
    return AGENTS | external_traits(settings)


def traits_of(manifest: Manifest) -> Traits:
    """Returns what a task needs to use this agent."""
    return Traits(
        needs_model=manifest.needs_model,
        writes=manifest.writes,
        tools=(manifest.name,) if manifest.placement is Placement.INSIDE else (),
        any_argument=True,
        summary=manifest.summary or f"version {manifest.version}, of {manifest.file.name}",
    )
