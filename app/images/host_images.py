"""Having images on this host before anybody needs them: on its engine, or, where there is none, unpacked."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from app.host.slots import HostSemaphore, Semaphore
from app.images.image_index import without_engine
from app.images.layer_store import ImageStore
from app.images.task_images import Images
from app.images.unpacked_images import OciImages
from app.models.spec import Bundle, EnvironmentSpec
from app.settings import Settings


class HostImages:
    """Single images wherever this host keeps them. fetch_bundle, semaphore: as for `Images`."""

    def __init__(
        self, settings: Settings, *, fetch_bundle: Callable[[Bundle], bytes], semaphore: Semaphore | None = None
    ) -> None:
        self._settings = settings
        semaphore = semaphore or HostSemaphore(settings.home / "run" / "slots")
        self._on_engine = Images(settings, fetch_bundle=fetch_bundle, semaphore=semaphore)
        store = ImageStore(settings.home.resolve())
        self._unpacked = OciImages(settings, store, fetch_bundle=fetch_bundle, semaphore=semaphore)

    def of_use(self, specs: Iterable[EnvironmentSpec]) -> list[EnvironmentSpec]:
        """Those that this host can have: several containers take an engine, and so does a recipe without a mirror."""
        if not without_engine(self._settings):
            return list(specs)
        mirror = self._settings.image_mirror
        return [spec for spec in specs if spec.compose is None and (spec.build is None or mirror is not None)]

    def here(self, spec: EnvironmentSpec) -> bool:
        """Nothing is fetched or made.

        Raises: EngineUnavailable, ImageUnavailable: the engine does not say.
        """
        if without_engine(self._settings):
            return self._unpacked.here(spec)
        return self._on_engine.here(spec) is not None

    def ensure(self, spec: EnvironmentSpec, *, timeout_s: float) -> None:
        """Have it here.

        Raises: ImageUnavailable, ImageBuildFailed, EngineUnavailable, DiskFull.
        """
        if without_engine(self._settings):
            self._unpacked.ensure(spec, timeout_s=timeout_s)
        else:
            self._on_engine.ensure(spec, timeout_s=timeout_s)
