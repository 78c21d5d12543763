"""Containers, made the quickest way that this host allows: without a daemon where that gives the same, else by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from app.environments.base import Environment, EnvironmentProvider, Tags
from app.environments.docker import DockerProvider
from app.environments.engine import url_of
from app.environments.host_slots import Gate
from app.environments.oci import OciProvider, available
from app.models.spec import Bundle, EnvironmentSpec, Network
from app.settings import Settings


class QuickestProvider:
    """Decides for each environment. An engine on another host is there for its capacity: it makes them all."""

    def __init__(
        self, settings: Settings, *, fetch_bundle: Callable[[Bundle], bytes], gate: Gate | None = None
    ) -> None:
        self._settings = settings
        self._docker = DockerProvider(settings, fetch_bundle=fetch_bundle, gate=gate)
        self._oci = OciProvider(settings, fetch_bundle=fetch_bundle, gate=gate)

    def prepare_image(self, spec: EnvironmentSpec, *, timeout_s: float) -> str:
        return self._for(spec).prepare_image(spec, timeout_s=timeout_s)

    def create(self, spec: EnvironmentSpec, tags: Tags, *, timeout_s: float) -> Environment:
        return self._for(spec).create(spec, tags, timeout_s=timeout_s)

    def sweep(self, *, installation: str, keep: Mapping[str, bool] | None = None) -> list[str]:
        removed = self._oci.sweep(installation=installation, keep=keep) if available(self._settings) is None else []
        return removed + self._docker.sweep(installation=installation, keep=keep)

    def _for(self, spec: EnvironmentSpec) -> EnvironmentProvider:
        here = url_of(self._settings).startswith("unix://")
        fits = here and spec.network is Network.NONE
        return self._oci if fits and available(self._settings) is None else self._docker
