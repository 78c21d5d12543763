"""Lists the single images that environments need, for prefetching."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from app.compose_file.plan import ComposePlan, planned
from app.host.disk import disk_named
from app.images.metadata import ImageMetadata
from app.images.references import key_of
from app.models.spec import Build, Bundle, EnvironmentSpec
from app.settings import Settings

_REMEMBERED = 1 << 16


class Parts:
    """Images that each environment needs. A project's file is read once per host. Safe to share between threads."""

    def __init__(self, settings: Settings, *, fetch_bundle: Callable[[Bundle], bytes]) -> None:
        self._book = ImageMetadata(settings)
        self._fetch_bundle = fetch_bundle
        self._scratch = settings.home / "cache" / "contexts"
        self._known: dict[str, tuple[EnvironmentSpec, dict[str, dict[str, Any]]]] = {}  # by the project's key

    def is_read(self, spec: EnvironmentSpec) -> bool:
        """Whether `of` has nothing to read."""
        return spec.compose is None or self._noted(spec) is not None

    def of(self, spec: EnvironmentSpec) -> list[EnvironmentSpec]:
        """Returns an environment for each image. Raises: SpecInvalid: its file; DiskFull; as `fetch_bundle`."""
        if spec.compose is None:
            return [spec]
        sources = self._noted(spec)
        if sources is None:
            with disk_named(f"read {spec.label}"):
                note_parts(self._book, spec, planned(spec, self._fetch_bundle, self._scratch))
            sources = self._noted(spec) or {}
        return [_single(spec, source) for source in sources.values()]

    def fetch(self, bundle: Bundle) -> bytes:
        """Fetches like `fetch_bundle`; cuts a service's context out of its project's bundle, if `of` has read that."""
        for project, sources in list(self._known.values()):
            if bundle.sha256 in {one["build"]["context"]["sha256"] for one in sources.values() if one["build"]}:
                contexts = planned(project, self._fetch_bundle, self._scratch).contexts
                if bundle.sha256 in contexts:
                    return contexts[bundle.sha256]
        return self._fetch_bundle(bundle)

    def _noted(self, spec: EnvironmentSpec) -> dict[str, dict[str, Any]] | None:
        key = key_of(spec)
        if key not in self._known:
            sources = self._book.parts(key)
            if sources is None:
                return None
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[key] = spec, sources
        return self._known[key][1]


def note_parts(book: ImageMetadata, spec: EnvironmentSpec, plan: ComposePlan) -> None:
    """Records for all processes of this host which images a project needs."""
    sources = {
        key_of(part): {"image": part.image, "build": part.build and part.build.model_dump(mode="json")}
        for part in plan.images.values()
    }
    book.note_parts(key_of(spec), sources)


def _single(spec: EnvironmentSpec, source: dict[str, Any]) -> EnvironmentSpec:
    build = source["build"] and Build.model_validate(source["build"])
    return spec.model_copy(update={"compose": None, "build": build, "image": source["image"], "setup": ()})
