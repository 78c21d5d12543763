"""Chooses `oci` or `docker` for an environment on this host.

An engine always makes the environments with several containers.
"""

from __future__ import annotations

from typing import Unpack

from app.environments.contract import Environment, EnvironmentProvider, Tags
from app.environments.runtimes.compose.provider import ComposeProvider
from app.environments.runtimes.docker.provider import DockerProvider
from app.environments.runtimes.oci import OciProvider, available
from app.environments.runtimes.setup import HostProvider, ProviderOptions
from app.errors import EngineUnavailable
from app.host.engine import engine_of, url_of
from app.models.spec import EnvironmentSpec, Network
from app.settings import Settings


class AutoProvider(HostProvider):
    """Chooses a kind for each environment. An engine on another host is there for its capacity: it makes them all."""

    def __init__(self, settings: Settings, **options: Unpack[ProviderOptions]) -> None:
        super().__init__(settings, **options)
        self._docker = DockerProvider(settings, **options)
        self._oci = OciProvider(settings, **options)
        self._compose = ComposeProvider(settings, **options)

    def kind_of(self, spec: EnvironmentSpec) -> str:
        if spec.compose is not None:
            return "compose"
        return "oci" if self._for(spec) is self._oci else "docker"

    def prepare_image(self, spec: EnvironmentSpec, *, timeout_s: float) -> str:
        return self._for(spec).prepare_image(spec, timeout_s=timeout_s)

    def create(self, spec: EnvironmentSpec, tags: Tags, *, timeout_s: float) -> Environment:
        return self._for(spec).create(spec, tags, timeout_s=timeout_s)

    def _for(self, spec: EnvironmentSpec) -> EnvironmentProvider:
        if spec.compose is not None:
            self._refuse_without_engine(f"{spec.label} has several containers, which take an engine")
            return self._compose
        if spec.network is Network.OPEN:
            self._refuse_without_engine(
                f"{spec.label} asks for the network `open`, which takes an engine",
                "Or name the hosts that it may reach: `allowlist` takes none.",
            )
        # Other policies forward allowed traffic into the container: only `open` needs a network.
        here = url_of(self._settings).startswith("unix://")
        fits = here and spec.network is not Network.OPEN
        return self._oci if fits and self._engineless else self._docker

    @property
    def _engineless(self) -> bool:
        return self._settings.container_runtime != "docker" and available(self._settings) is None

    def _refuse_without_engine(self, why: str, otherwise: str = "") -> None:
        """Checks that there is an engine. otherwise: the alternative, for a host that makes containers without one."""
        try:
            engine_of(self._settings)
        except EngineUnavailable as error:
            fix = f" {otherwise}" if otherwise and self._engineless else ""
            raise EngineUnavailable(f"{why}: {error}{fix}") from error
