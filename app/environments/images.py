"""Task images: found on the engine, pulled, or built; once per host however many threads and processes ask."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import requests
import structlog
from docker.errors import ImageNotFound
from docker.utils import parse_repository_tag
from docker.utils.build import tar as tar_context
from urllib3.exceptions import HTTPError

from app.environments import archives
from app.environments.disk import disk_named, no_space
from app.environments.engine import Engine, engine_of
from app.environments.host_slots import Gate, HostGate, turn
from app.environments.sources import fetch_sources
from app.errors import DiskFull, EngineUnavailable, EnvironmentFailed, ImageBuildFailed, ImageUnavailable
from app.models.spec import Build, Bundle, EnvironmentSpec
from app.settings import Settings

log = structlog.get_logger()

_LOG_TAIL = 3000
_BUILD_MEMORY_BYTES = 2 << 30
"""A build step gets at least this much: compilers need more than the tests they build."""
_ARG_BASE = re.compile(r"^\s*ARG\s+BASE_IMAGE\b", re.IGNORECASE | re.MULTILINE)
_FROM = re.compile(r"^\s*FROM\s+(?:--platform=\S+\s+)?(\S+)(?:\s+AS\s+(\S+))?", re.IGNORECASE | re.MULTILINE)
_HUB = ("docker.io", "index.docker.io", "registry-1.docker.io")


class Images:
    """The images of one host.

    `fetch_bundle` gives a bundle's uncompressed tar from the artifact store. `gate` bounds how many images are made at
    a time (None: on this host alone).
    """

    def __init__(
        self, settings: Settings, *, fetch_bundle: Callable[[Bundle], bytes], gate: Gate | None = None
    ) -> None:
        self._settings = settings
        self._fetch_bundle = fetch_bundle
        self._locks = settings.home / "run" / "slots"
        self._gate = gate or HostGate(self._locks)

    @property
    def _engine(self) -> Engine:
        return engine_of(self._settings)

    def ensure(self, spec: EnvironmentSpec, *, timeout_s: float) -> str:
        """Have the spec's image on the engine and return its id.

        Raises: ImageUnavailable, ImageBuildFailed, EngineUnavailable, DiskFull.
        """
        deadline = time.monotonic() + timeout_s
        if spec.build is None:
            return self._pulled(spec.image or "", deadline)
        return self._built(spec.build, max(_BUILD_MEMORY_BYTES, spec.resources.memory_bytes), deadline)

    def find(self, reference: str) -> str | None:
        """The id of an image that the engine has, or None."""
        try:
            with self._engine.named(f"look for image {reference}", ImageUnavailable):
                found: dict[str, Any] = self._engine.api.inspect_image(reference)  # type: ignore[no-untyped-call]
                return str(found["Id"])
        except ImageUnavailable as error:
            if isinstance(error.__cause__, ImageNotFound):
                return None
            raise

    # --- By reference ---------------------------------------------------------------------------------------------

    def _pulled(self, reference: str, deadline: float, *, counted: bool = True) -> str:
        candidates = [*self._mirrored(reference), reference]
        for candidate in reversed(candidates):
            if (found := self.find(candidate)) is not None:
                return found
        # A build's base has a turn of its own: who has a place here must not wait for somebody who waits for a place.
        turn_name = f"{'pull' if counted else 'base'}-{_short(reference)}"
        with self._once(turn_name, f"pull {reference}", deadline, counted=counted):
            for candidate in candidates:
                if (found := self.find(candidate)) is not None:
                    return found
            return self._pull_first(reference, candidates, deadline)

    def _pull_first(self, reference: str, candidates: list[str], deadline: float) -> str:
        refusals = []
        for candidate in candidates:
            begun = time.monotonic()
            with self._gate.hold(f"image_pulls:{registry_of(candidate)}", None, timeout_s=deadline - begun):
                refusal = self._pull(candidate, deadline)
            found = self.find(candidate) if refusal is None else None
            if found is not None:
                log.info("image.pulled", image=candidate, took_s=round(time.monotonic() - begun, 3))
                return found
            refusals.append(f"{candidate}: {refusal or 'pulled, but not there afterwards'}")
        raise ImageUnavailable(
            f"image {reference} is neither on this engine nor could it be pulled ({'; '.join(refusals)}). Check the "
            "reference and `docker login`, load it with `docker load`, or name a registry that has it in "
            "MEGAFLOW_IMAGE_MIRROR."
        )

    def _pull(self, reference: str, deadline: float) -> str | None:
        """None when it worked, else what the registry said."""
        repository, tag = parse_repository_tag(reference)
        try:
            with self._engine.named(f"pull {reference}", ImageUnavailable):
                progress = self._engine.api.pull(repository, tag=tag or "latest", stream=True, decode=True)
                for step in progress:
                    if "error" in step:
                        _raise_if_full(step["error"], f"pull {reference}")
                        return str(step["error"])
                    if time.monotonic() > deadline:
                        progress.close()
                        return "it took longer than this task allows for its image"
        except ImageUnavailable as error:
            return str(getattr(error.__cause__, "explanation", None) or error)
        return None

    def _mirrored(self, reference: str) -> list[str]:
        """What the mirror calls it: the registry's host is replaced, Docker Hub's bare names get their `library/`."""
        mirror = self._settings.image_mirror
        if mirror is None or reference.startswith("sha256:"):
            return []
        host, path = _located(reference)
        if host in _HUB and "/" not in path:
            path = f"library/{path}"
        return [f"{mirror.rstrip('/')}/{path}"]

    # --- By recipe ------------------------------------------------------------------------------------------------

    def _built(self, build: Build, memory_bytes: int, deadline: float) -> str:
        base = self.find(self._settings.base_image) or ""
        tag = f"megaflow/task:{_short(build.context.sha256, build.dockerfile, base)}"
        if (found := self.find(tag)) is not None:
            return found
        with self._once(f"build-{tag.rpartition(':')[2]}", f"build {tag}", deadline):
            if (found := self.find(tag)) is not None:
                return found
            return self._build(build, tag, memory_bytes, deadline)

    def _build(self, build: Build, tag: str, memory_bytes: int, deadline: float) -> str:
        begun = time.monotonic()
        deadline = min(deadline, begun + build.timeout_s)
        with disk_named(f"build {tag}"), self._context(build.context) as folder:
            recipe = _recipe(folder, build.dockerfile)
            params = self._parameters(build, tag, recipe, memory_bytes, closed=(folder / "sources.txt").exists())
            for reference in _bases(recipe):
                self._pulled(reference, deadline, counted=False)  # this build's own slot covers it
            with tempfile.TemporaryFile() as packed:
                tar_context(folder, fileobj=packed)
                packed.seek(0)
                Builder(self._engine, self._log_file(tag)).build(tag, params, packed, deadline)
        found = self.find(tag)
        if found is None:
            raise ImageUnavailable(f"{tag} was built, but is not there afterwards; was it pruned? Try again.")
        log.info("image.built", image=tag, took_s=round(time.monotonic() - begun, 3))
        return found

    def _parameters(self, build: Build, tag: str, recipe: str, memory_bytes: int, *, closed: bool) -> dict[str, Any]:
        arguments = {}
        if _ARG_BASE.search(recipe):
            arguments["BASE_IMAGE"] = base = self._settings.base_image
            if self.find(base) is None:
                raise ImageUnavailable(
                    f"the recipe builds on {base}, which is not on this engine. `megaflow up` makes it; or run "
                    f"`sh worker_images/base/build-from-packages.sh {base}`, or name another in MEGAFLOW_BASE_IMAGE."
                )
        labels = {"megaflow": self._settings.installation, "megaflow.image": "task"}
        params: dict[str, Any] = {"t": tag, "dockerfile": build.dockerfile, "rm": "1", "forcerm": "1"}
        params |= {"memory": memory_bytes, "memswap": memory_bytes, "labels": labels, "buildargs": arguments}
        return params | ({"networkmode": "none"} if closed else {})

    @contextmanager
    def _context(self, bundle: Bundle) -> Iterator[Path]:
        """The build context as a folder, with the sources that it names."""
        cache = self._settings.home / "cache"
        (cache / "contexts").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache / "contexts") as name:
            folder = Path(name)
            archives.unpack(self._fetch_bundle(bundle), folder)
            fetch_sources(folder, cache=cache / "sources")
            yield folder

    def _log_file(self, tag: str) -> Path:
        file = self._settings.home / "logs" / "builds" / f"{tag.replace('/', '-').replace(':', '-')}.log"
        file.parent.mkdir(parents=True, exist_ok=True)
        return file

    @contextmanager
    def _once(self, name: str, doing: str, deadline: float, *, counted: bool = True) -> Iterator[None]:
        """One at a time for this image, and, when `counted`, few at a time on this host."""
        limit, capacity = f"image_builds:{host_of(self._engine)}", self._settings.image_builds
        try:
            with turn(self._locks / name, timeout_s=deadline - time.monotonic()):
                left_s = deadline - time.monotonic()
                with self._gate.hold(limit, capacity, timeout_s=left_s) if counted else nullcontext():
                    yield
        except TimeoutError as error:
            raise ImageUnavailable(f"could not {doing} in time: {error}; others are being made, try again.") from error


@dataclass
class Builder:
    """One build on the engine, its output kept in `log_file`."""

    engine: Engine
    log_file: Path

    def build(self, tag: str, params: dict[str, Any], context: IO[bytes], deadline: float) -> None:
        """Raises: ImageBuildFailed with the log's tail, DiskFull, EngineUnavailable."""
        with self.log_file.open("w") as written:
            try:
                failure = self._follow(params, context, written, deadline)
            except (requests.RequestException, HTTPError) as error:
                if time.monotonic() < deadline:
                    raise EngineUnavailable(f"build {tag}: the connection to the engine broke ({error}).") from error
                failure = None
        if time.monotonic() >= deadline:
            failure = "it took longer than this task allows for its image"
        if failure:
            _raise_if_full(failure, f"build {tag}")
            tail = self.log_file.read_text(errors="replace")[-_LOG_TAIL:]
            raise ImageBuildFailed(f"{tag} could not be built: {failure}\nThe log's end ({self.log_file}):\n{tail}")

    def _follow(self, params: dict[str, Any], context: IO[bytes], written: IO[str], deadline: float) -> str | None:
        """What went wrong, or None. At the deadline the connection is cut, whereupon the engine stops the step."""
        response = self._start(params, context, max(1.0, deadline - time.monotonic()))
        with response:
            if response.status_code != 200:
                return response.text
            timer = threading.Timer(max(0.0, deadline - time.monotonic()), response.raw.shutdown)
            timer.daemon = True
            timer.start()
            try:
                for line in response.iter_lines():
                    step = json.loads(line)
                    written.write(str(step.get("stream") or step.get("status") or step.get("error") or ""))
                    if "error" in step:
                        return str(step["error"])
            finally:
                timer.cancel()
        return None

    def _start(self, params: dict[str, Any], context: IO[bytes], timeout_s: float) -> requests.Response:
        # Not the client's own `build`: it hides the response, without which nothing can cut a build that hangs.
        api = self.engine.api
        encoded = {key: json.dumps(value) if isinstance(value, dict) else value for key, value in params.items()}
        with self.engine.named("start a build", ImageBuildFailed):
            return api.post(
                f"{api.base_url}/v{api.api_version}/build",
                params=encoded,
                data=context,
                headers={"Content-Type": "application/x-tar"},
                stream=True,
                timeout=(30.0, timeout_s),
            )


@lru_cache(maxsize=8)
def host_of(engine: Engine) -> str:
    """What the engine calls its host: the same for all that share it, wherever they run.

    Raises: EngineUnavailable, EnvironmentFailed.
    """
    with engine.named("ask for its name", EnvironmentFailed):
        return str(engine.api.info()["Name"])


def registry_of(reference: str) -> str:
    """Where an image is pulled from: `docker.io`, `ghcr.io`, `localhost:5000`."""
    host, _ = _located(reference)
    return _HUB[0] if host in _HUB else host


def _located(reference: str) -> tuple[str, str]:
    """Registry and path; a name without a registry is Docker Hub's."""
    host, slash, path = reference.partition("/")
    named = slash and ("." in host or ":" in host or host == "localhost")
    return (host, path) if named else (_HUB[0], reference)


def _short(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _recipe(folder: Path, name: str) -> str:
    file = (folder / name).resolve()
    if not file.is_relative_to(folder.resolve()) or not file.is_file():
        found = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        raise ImageBuildFailed(f"expected {name} in the build context, found {found}.")
    return file.read_text(errors="replace")


def _bases(recipe: str) -> list[str]:
    """References that the recipe builds on; not its own stages, and none that an argument would have to complete."""
    found = _FROM.findall(recipe)
    stages = {stage.lower() for _, stage in found if stage}
    return [base for base, _ in found if "$" not in base and base != "scratch" and base.lower() not in stages]


def _raise_if_full(text: str, doing: str) -> None:
    if no_space(text):
        raise DiskFull(f"{doing}: the engine's disk is full ({text.strip()}); free some with `docker system prune`.")
