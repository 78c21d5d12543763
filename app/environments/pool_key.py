"""The key under which a reset environment may be given to the next attempt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from app.models.spec import Compose, EnvironmentKind, EnvironmentSpec, Network, Resources, Reuse


@dataclass(frozen=True, slots=True)
class Key:
    """What two tasks must share so that one may have the other's environment."""

    kind: EnvironmentKind
    image_id: str  # not the reference: a tag may move
    resources: Resources
    network: Network
    allowed_hosts: frozenset[str]
    workdir: str
    env: frozenset[tuple[str, str]]
    setup: tuple[str, ...]
    tools: frozenset[tuple[str, str]]  # each with its version: the name of its folder
    compose: Compose | None
    read_only: bool  # made to be shared: its root takes no writes

    @classmethod
    def of(cls, spec: EnvironmentSpec, image_id: str, tools: Mapping[str, str] | None = None) -> Key:
        """tools: versions by name (`EnvironmentProvider.tool_versions`)."""
        versions = tools or {}
        return cls(
            kind=spec.kind,
            image_id=image_id,
            resources=spec.resources,
            network=spec.network,
            allowed_hosts=frozenset(spec.allowed_hosts),
            workdir=spec.workdir,
            env=frozenset(spec.env.items()),
            setup=spec.setup,
            tools=frozenset((name, versions.get(name, "")) for name in spec.tools),
            compose=spec.compose,
            read_only=spec.reuse is Reuse.SHARED_READONLY,
        )
