"""Pulls, pushes and inspects images at a registry through the engine.

Requests to a registry that is busy or temporarily failing are repeated with growing delays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, TypeVar

from docker.utils import parse_repository_tag

from app.errors import DiskFull, EnvironmentFailed, ImageUnavailable, ImageUnfit
from app.host.disk import no_space
from app.host.engine import Engine
from app.images.logins import login_for
from app.images.references import registry_of
from app.images.registry_refusals import RefusalKind, RegistryRefusal, persist
from app.settings import Settings

_T = TypeVar("_T")

COMPATIBLE = {("amd64", "386"), ("arm64", "arm")}
"""Pairs of an engine's architecture and another one that it also runs."""


class Registries:
    """The registries that an engine can reach. Raises (every method): RegistryRefusal, DiskFull, EngineUnavailable."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings

    def pull(self, reference: str, deadline: float) -> None:
        """Pulls the image to the engine. `deadline`: monotonic seconds."""
        self._move(f"pull {reference}", self._engine.api.pull, reference, deadline)

    def push(self, reference: str, deadline: float) -> None:
        """Pushes the engine's image of this name to its registry. Layers that the registry has are not sent again."""
        self._move(f"push {reference}", self._engine.api.push, reference, deadline)

    def look(self, reference: str, deadline: float) -> str | None:
        """Returns the digest that the registry has under this name; pulls nothing. None: it has no such image."""

        def once(login: dict[str, str]) -> dict[str, Any]:
            answer: dict[str, Any] = self._engine.api.inspect_distribution(reference, login)  # type: ignore[no-untyped-call]
            return answer

        try:
            answer = self._persist(f"look for {reference} in its registry", reference, once, deadline)
        except RegistryRefusal as refused:
            if refused.refusal is RefusalKind.ABSENT:
                return None
            raise
        return str(answer["Descriptor"]["digest"])

    def _move(self, doing: str, move: Callable[..., Any], reference: str, deadline: float) -> None:
        name, tag = parse_repository_tag(reference)

        def once(login: dict[str, str]) -> None:
            steps = move(name, tag=tag or "latest", stream=True, decode=True, auth_config=login)
            self._follow(doing, steps, deadline)

        self._persist(doing, reference, once, deadline)

    def _persist(self, doing: str, reference: str, once: Callable[[dict[str, str]], _T], deadline: float) -> _T:
        """Repeats the request until the registry answers, while that can help. Looks up the login once."""
        login = login_for(self._settings, registry_of(reference))
        return persist(lambda: self._named(doing, partial(once, login)), deadline)

    def _named(self, doing: str, once: Callable[[], _T]) -> _T:
        try:
            with self._engine.named(doing, ImageUnavailable):
                return once()
        except RegistryRefusal:
            raise
        except ImageUnavailable as error:
            message = str(getattr(error.__cause__, "explanation", None) or error.__cause__ or error)
            raise RegistryRefusal(doing, message) from error.__cause__

    def _follow(self, doing: str, steps: Iterator[dict[str, Any]], deadline: float) -> None:
        for step in steps:
            if "error" in step:
                message = str(step["error"])
                if no_space(message):
                    raise DiskFull(
                        f"{doing}: the disk is full ({message.strip()}); free some, or lower MEGAFLOW_IMAGE_DISK_HIGH."
                    )
                raise RegistryRefusal(doing, message)
            if time.monotonic() > deadline:
                steps.close()  # type: ignore[attr-defined]
                raise RegistryRefusal(doing, "it took longer than this task allows for its image", RefusalKind.OTHER)


@lru_cache(maxsize=8)
def architecture_of(engine: Engine) -> str:
    """Returns the engine's architecture, as images spell it: `amd64`. Raises: EngineUnavailable, EnvironmentFailed."""
    with engine.named("ask for its architecture", EnvironmentFailed):
        return str(engine.api.version()["Arch"])


def refuse_foreign(reference: str, built_for: str, engine: Engine) -> None:
    """Refuses an image whose programs cannot run on this engine, before anything starts. Raises: ImageUnfit."""
    here = architecture_of(engine)
    if built_for and built_for != here and (here, built_for) not in COMPATIBLE:
        raise wrong_architecture(reference, built_for, here)


def wrong_architecture(reference: str, built_for: str, here: str) -> ImageUnfit:
    return ImageUnfit(
        f"image {reference} is built for {built_for}, this engine runs {here}; name an image for {here}, or run the "
        "task where the architecture fits."
    )
