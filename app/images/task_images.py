"""Finds, pulls or builds a task's image on the engine, once per host."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import structlog
from docker.errors import ImageNotFound
from docker.utils.build import tar as tar_context

from app.errors import DiskFull, EnvironmentFailed, ImageUnavailable, ImageUnfit
from app.host import archives
from app.host.disk import disk_named
from app.host.engine import Engine, engine_of
from app.host.slots import HostSemaphore, Semaphore, turn
from app.images import references
from app.images.build import Builder, recipe_file
from app.images.build_limits import BuildLimits
from app.images.build_logs import BuildLogs
from app.images.build_sources import fetch_sources
from app.images.cache import ImageCache
from app.images.dockerfile import Dockerfile
from app.images.engine_registry import Registries, architecture_of, refuse_foreign, wrong_architecture
from app.images.logins import logins_of
from app.images.pull_source import PullSource, tell
from app.images.references import registry_of
from app.images.references import short as _short
from app.images.registry_refusals import RefusalKind, RegistryRefusal, pull_first
from app.models.spec import Build, Bundle, EnvironmentSpec
from app.settings import Settings

log = structlog.get_logger()

_ASK_S = 60.0
_SEEN_S = 1.0
"""Time for which a found image is assumed present, so that one of many replicas checks."""
_ARG_BASE = "BASE_IMAGE"
_NEEDED = (("/bin/sh",), ("/bin/sleep", "/usr/bin/sleep"))
"""Programs that every environment needs, with their possible paths."""


class Images:
    """The images of one host. fetch_bundle: returns a bundle's tar. semaphore: limits pulls and builds (None: here)."""

    def __init__(
        self, settings: Settings, *, fetch_bundle: Callable[[Bundle], bytes], semaphore: Semaphore | None = None
    ) -> None:
        self._settings = settings
        self._fetch_bundle = fetch_bundle
        self._locks = settings.home / "run" / "slots"
        self._semaphore = semaphore or HostSemaphore(self._locks)
        self._cache = ImageCache(settings)
        self._seen: dict[str, tuple[str, float]] = {}  # by reference: the id, and until when (monotonic)

    @property
    def _engine(self) -> Engine:
        return engine_of(self._settings)

    def ensure(self, spec: EnvironmentSpec, *, timeout_s: float) -> str:
        """Returns the image's id. Raises: ImageUnavailable, ImageBuildFailed, EngineUnavailable, DiskFull."""
        deadline = time.monotonic() + timeout_s
        try:
            image_id = self._ensured(spec, deadline)
        except DiskFull:
            if not self._cache.make_room(urgently=True):
                raise
            image_id = self._ensured(spec, deadline)
        self._cache.book.used(image_id, references.key_of(spec))
        return image_id

    @contextmanager
    def pinned(self, spec: EnvironmentSpec, *, timeout_s: float) -> Iterator[str]:
        """Yields the id as `ensure`. For the block the image stays on the engine, however much room is needed.

        Raises: ImageUnavailable, ImageBuildFailed, EngineUnavailable, DiskFull.
        """
        begun = time.monotonic()
        with ExitStack() as keeping:
            try:
                keeping.enter_context(self._cache.book.pinned(references.key_of(spec), timeout_s=timeout_s))
            except TimeoutError as error:
                raise ImageUnavailable(f"could not use image {spec.label} in time: {error}; try again.") from error
            yield self.ensure(spec, timeout_s=timeout_s - (time.monotonic() - begun))

    def forget(self, spec: EnvironmentSpec) -> None:
        """Forgets a found image that is gone, so that the engine is asked again."""
        self._seen.pop(spec.image or "", None)

    def here(self, spec: EnvironmentSpec) -> str | None:
        """Returns the id of the image if the engine has it; fetches and builds nothing. Raises: EngineUnavailable."""
        if spec.build is None:
            reference = spec.image or ""
            candidates = [reference, *self._mirrored(reference)]
        else:
            candidates = self._built_names(spec.build)
        return next((image_id for name in candidates if (image_id := self.find(name)) is not None), None)

    def refuse_unfit(self, container_id: str, image_id: str, label: str) -> None:
        """Refuses an image without a shell, by a container of it that need not have started.

        Checked only once per image and host.

        Raises: ImageUnfit, ImageUnavailable, EngineUnavailable; EnvironmentFailed: the container has gone.
        """
        if self._cache.book.fit(image_id):
            return
        for places in _NEEDED:
            if not any(self._has_file(container_id, path) for path in places):
                raise ImageUnfit(
                    f"image {label} has no {places[0]}: expected a POSIX shell and `sleep` in it, as every environment "
                    "needs; add them (busybox will do), or name another image."
                )
        self._cache.book.note_fit(image_id)

    def _has_file(self, container_id: str, path: str) -> bool:
        api = self._engine.api
        with self._engine.named(f"look for {path}", ImageUnavailable):
            url = f"{api.base_url}/v{api.api_version}/containers/{container_id}/archive"
            reply = api.head(url, params={"path": path}, timeout=_ASK_S)
            if reply.status_code != 404:
                reply.raise_for_status()
                return True
        with self._engine.named(f"look for {path}", EnvironmentFailed):
            api.inspect_container(container_id)  # the engine answers the same when the container is gone
        return False

    def find(self, reference: str) -> str | None:
        """Returns the id of an image that the engine has, or None."""
        description = self._described(reference)
        return None if description is None else str(description["Id"])

    def _ensured(self, spec: EnvironmentSpec, deadline: float) -> str:
        if spec.build is None:
            return self._pulled(spec.image or "", deadline)
        return self._built(spec.build, BuildLimits.of(spec.resources), deadline)

    def _described(self, reference: str) -> dict[str, Any] | None:
        try:
            with self._engine.named(f"look for image {reference}", ImageUnavailable):
                description: dict[str, Any] = self._engine.api.inspect_image(reference)  # type: ignore[no-untyped-call]
                return description
        except ImageUnavailable as error:
            if isinstance(error.__cause__, ImageNotFound):
                return None
            raise

    def _runnable(self, reference: str) -> str | None:
        description = self._described(reference)
        if description is None:
            return None
        refuse_foreign(reference, str(description.get("Architecture") or ""), self._engine)
        return str(description["Id"])

    def _fitting(self, reference: str) -> str | None:
        """Returns as `find`; None also for another architecture: there may be a better image elsewhere."""
        try:
            return self._runnable(reference)
        except ImageUnfit:
            return None

    def _pulled(self, reference: str, deadline: float, *, counted: bool = True) -> str:
        seen, until = self._seen.get(reference, ("", 0.0))
        if counted and time.monotonic() < until:
            return seen
        candidates = [*self._mirrored(reference), reference]
        for candidate in reversed(candidates):
            look = self._runnable if candidate == reference else self._fitting
            if (image_id := look(candidate)) is not None:
                self._seen[reference] = image_id, time.monotonic() + _SEEN_S
                return image_id
        # A build's base has its own lock: a process with a place must not wait for a process that waits for one.
        turn_name = f"{'pull' if counted else 'base'}-{_short(reference)}"
        with self._once(turn_name, f"pull {reference}", deadline, counted=counted):
            tell(PullSource.PULL)
            for candidate in candidates:
                if (image_id := self._runnable(candidate)) is not None:
                    return image_id
            return pull_first(reference, candidates, lambda one: self._pull(one, reference, deadline))

    def _pull(self, candidate: str, key: str, deadline: float) -> str:
        begun = time.monotonic()
        limit, capacity = f"image_pulls:{registry_of(candidate)}", self._settings.image_pulls
        with self._semaphore.hold(limit, capacity, timeout_s=deadline - begun):
            try:
                Registries(self._engine, self._settings).pull(candidate, deadline)
            except RegistryRefusal as refused:
                if refused.refusal is RefusalKind.PLATFORM:
                    here = architecture_of(self._engine)
                    raise wrong_architecture(candidate, "other architectures", here) from refused
                raise
        image_id = self._runnable(candidate)
        if image_id is None:
            raise RegistryRefusal(f"pull {candidate}", "pulled, but not there afterwards", RefusalKind.OTHER)
        self._cache.book.made(image_id, key, [candidate])
        log.info("image.pulled", image=candidate, took_s=round(time.monotonic() - begun, 3))
        return image_id

    def _mirrored(self, reference: str) -> list[str]:
        mirror = self._settings.image_mirror
        return [] if mirror is None else references.in_mirror(mirror, reference)

    def _built(self, build: Build, limits: BuildLimits, deadline: float) -> str:
        tag, *shared = candidates = self._built_names(build)
        for candidate in candidates:
            if (image_id := self._fitting(candidate)) is not None:
                return image_id
        with self._once(f"build-{tag.rpartition(':')[2]}", f"build {tag}", deadline):
            for candidate in candidates:
                if (image_id := self._fitting(candidate)) is not None:
                    tell(PullSource.BUILD if candidate == tag else PullSource.PULL)  # made by another process
                    return image_id
            for candidate in shared:
                if (image_id := self._from_mirror(candidate, build, deadline)) is not None:
                    tell(PullSource.PULL)
                    return image_id
            tell(PullSource.BUILD)
            return self._build(build, tag, limits, deadline)

    def _built_names(self, build: Build) -> list[str]:
        """Returns the built image's name here; then, with a mirror, its name there by `megaflow images sync`."""
        here = references.built_here(build, self.find(self._settings.base_image) or "")
        mirror = self._settings.image_mirror
        return [here] if mirror is None else [here, references.built_for_all(mirror, build, self._settings.base_image)]

    def _from_mirror(self, candidate: str, build: Build, deadline: float) -> str | None:
        """Pulls the image from the mirror; None if the mirror lacks it or cannot give it: then it is built."""
        try:
            return self._pull(candidate, references.key_of(EnvironmentSpec(build=build)), deadline)
        except RegistryRefusal as refused:
            if refused.refusal is not RefusalKind.ABSENT:
                log.warning("image.not_from_mirror", image=candidate, reason=refused.reason)
            return None
        except ImageUnfit as unfit:
            log.info("image.not_from_mirror", image=candidate, reason=str(unfit))
            return None

    def _build(self, build: Build, tag: str, limits: BuildLimits, deadline: float) -> str:
        begun = time.monotonic()
        deadline = min(deadline, begun + build.timeout_s)
        with ExitStack() as keeping:
            keeping.enter_context(disk_named(f"build {tag}"))
            folder = keeping.enter_context(self._context(build.context))
            file = recipe_file(folder, build.dockerfile)
            recipe, arguments = self._recipe(file)
            elsewhere = self._bases(recipe, deadline, keeping)
            params = self._parameters(build, tag, arguments, closed=(folder / "sources.txt").exists())
            if elsewhere:
                file.write_bytes(recipe.on(elsewhere).encode(errors="surrogateescape"))
            packed = keeping.enter_context(tempfile.TemporaryFile())
            tar_context(folder, fileobj=packed)
            packed.seek(0)
            output = keeping.enter_context(BuildLogs(self._settings).begun(tag))
            for reference, image_id in elsewhere.items():
                output.note(f"{reference} is {image_id} here")
            builder = Builder(self._engine, output, limits, self._locks / "build-disk-watch", logins_of(self._settings))
            builder.build(tag, params, packed, deadline)
        built_id = self.find(tag)
        if built_id is None:
            raise ImageUnavailable(f"{tag} was built, but is not there afterwards; was it pruned? Try again.")
        self._cache.book.made(built_id, references.key_of(EnvironmentSpec(build=build)), [tag])
        log.info("image.built", image=tag, took_s=round(time.monotonic() - begun, 3))
        return built_id

    def _recipe(self, file: Path) -> tuple[Dockerfile, dict[str, str]]:
        text = file.read_bytes().decode(errors="surrogateescape")
        if not Dockerfile(text).takes(_ARG_BASE):
            return Dockerfile(text), {}
        base = self._settings.base_image
        if self.find(base) is None:
            raise ImageUnavailable(
                f"the recipe builds on {base}, which is not on this engine. `megaflow up` makes it; or run "
                f"`sh worker_images/base/build-from-packages.sh {base}`, or name another in MEGAFLOW_BASE_IMAGE."
            )
        return Dockerfile(text, {_ARG_BASE: base}), {_ARG_BASE: base}

    def _bases(self, recipe: Dockerfile, deadline: float, keeping: ExitStack) -> dict[str, str]:
        """Pulls and pins the recipe's bases. Returns ids of those with other names there. Raises: as `ensure`."""
        elsewhere = {}
        for reference in dict.fromkeys(base.reference for base in recipe.bases):
            try:
                keeping.enter_context(self._cache.book.pinned(reference, timeout_s=deadline - time.monotonic()))
            except TimeoutError as error:
                raise ImageUnavailable(f"could not use image {reference} in time: {error}; try again.") from error
            image_id = self._pulled(reference, deadline, counted=False)  # this build's own slot covers it
            self._cache.book.used(image_id, reference)
            if self.find(reference) != image_id:
                elsewhere[reference] = image_id
        return elsewhere

    def _parameters(self, build: Build, tag: str, arguments: dict[str, str], *, closed: bool) -> dict[str, Any]:
        labels = {"megaflow": self._settings.installation, "megaflow.image": "task"}
        params: dict[str, Any] = {"t": tag, "dockerfile": build.dockerfile, "rm": "1", "forcerm": "1"}
        params |= {"labels": labels, "buildargs": arguments}
        return params | ({"networkmode": "none"} if closed else {})

    @contextmanager
    def _context(self, bundle: Bundle) -> Iterator[Path]:
        cache = self._settings.home / "cache"
        (cache / "contexts").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache / "contexts") as name:
            folder = Path(name)
            archives.unpack(self._fetch_bundle(bundle), folder)
            fetch_sources(folder, cache=cache / "sources")
            yield folder

    @contextmanager
    def _once(self, name: str, doing: str, deadline: float, *, counted: bool = True) -> Iterator[None]:
        """Allows one process at a time for this image, and, when `counted`, few at a time on this host."""
        limit, capacity = f"image_builds:{host_of(self._engine)}", self._settings.image_builds
        try:
            with turn(self._locks / name, timeout_s=deadline - time.monotonic()):
                left_s = deadline - time.monotonic()
                with self._semaphore.hold(limit, capacity, timeout_s=left_s) if counted else nullcontext():
                    if counted:
                        self._cache.make_room()
                    yield
        except TimeoutError as error:
            raise ImageUnavailable(f"could not {doing} in time: {error}; others are being made, try again.") from error


def host_of(engine: Engine) -> str:
    """Returns the engine's name of its host, alike for all clients. Raises: EngineUnavailable, EnvironmentFailed."""
    return str(engine.about["Name"])
