"""Lists the single images that environments need, for a registry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from app.compose_file.plan import planned
from app.host.disk import disk_named
from app.models.spec import Bundle, EnvironmentSpec


class Parts:
    """Images of environments, each as an environment of its own. fetch_bundle: returns a bundle's tar."""

    def __init__(self, scratch: Path, fetch_bundle: Callable[[Bundle], bytes]) -> None:
        self._scratch = scratch
        self._fetch_bundle = fetch_bundle
        self._projects: dict[str, EnvironmentSpec] = {}  # by the digest of a service's build context

    def of(self, spec: EnvironmentSpec) -> list[EnvironmentSpec]:
        """Returns an environment for each image. Raises: SpecInvalid: its file; DiskFull; as `fetch_bundle`."""
        if spec.compose is None:
            return [spec]
        with disk_named(f"read {spec.label}"):
            plan = planned(spec, self._fetch_bundle, self._scratch)
        self._projects |= dict.fromkeys(plan.contexts, spec)
        return list(plan.images.values())

    def fetch(self, bundle: Bundle) -> bytes:
        """Fetches like `fetch_bundle`; cuts a service's context out of its project's bundle."""
        project = self._projects.get(bundle.sha256)
        if project is None:
            return self._fetch_bundle(bundle)
        return planned(project, self._fetch_bundle, self._scratch).contexts[bundle.sha256]
