"""Pulls, pushes and inspects images at a registry through the engine.

A registry that is busy or has a fault of the moment is asked again, later and later.
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
"""What an engine runs beside its own architecture."""


class Registries:
    """The registries that an engine can reach. Raises (every method): RegistryRefusal, DiskFull, EngineUnavailable."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings

    def pull(self, reference: str, deadline: float) -> None:
        """Have it on the engine. `deadline`: monotonic seconds."""
        self._move(f"pull {reference}", self._engine.api.pull, reference, deadline)

    def push(self, reference: str, deadline: float) -> None:
        """Put the engine's image of this name into its registry. What the registry has already is not sent again."""
        self._move(f"push {reference}", self._engine.api.push, reference, deadline)

    def look(self, reference: str, deadline: float) -> str | None:
        """The digest of what the registry has under this name; nothing is pulled. None: it has no such image."""

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
        """Ask until the registry answers, for as long as that can help; as whom, is found out once."""
        login = login_for(self._settings, registry_of(reference))
        return persist(lambda: self._named(doing, partial(once, login)), deadline)

    def _named(self, doing: str, once: Callable[[], _T]) -> _T:
        try:
            with self._engine.named(doing, ImageUnavailable):
                return once()
        except RegistryRefusal:
            raise
        except ImageUnavailable as error:
            said = str(getattr(error.__cause__, "explanation", None) or error.__cause__ or error)
            raise RegistryRefusal(doing, said) from error.__cause__

    def _follow(self, doing: str, steps: Iterator[dict[str, Any]], deadline: float) -> None:
        for step in steps:
            if "error" in step:
                said = str(step["error"])
                if no_space(said):
                    raise DiskFull(
                        f"{doing}: the disk is full ({said.strip()}); free some with `megaflow images evict`."
                    )
                raise RegistryRefusal(doing, said)
            if time.monotonic() > deadline:
                steps.close()  # type: ignore[attr-defined]
                raise RegistryRefusal(doing, "it took longer than this task allows for its image", RefusalKind.OTHER)


@lru_cache(maxsize=8)
def architecture_of(engine: Engine) -> str:
    """As images spell it: `amd64`, `arm64`. Raises: EngineUnavailable, EnvironmentFailed."""
    with engine.named("ask for its architecture", EnvironmentFailed):
        return str(engine.api.version()["Arch"])


def refuse_foreign(reference: str, built_for: str, engine: Engine) -> None:
    """Tell before anything starts that an image's programs cannot run on this engine. Raises: ImageUnfit."""
    here = architecture_of(engine)
    if built_for and built_for != here and (here, built_for) not in COMPATIBLE:
        raise wrong_architecture(reference, built_for, here)


def wrong_architecture(reference: str, built_for: str, here: str) -> ImageUnfit:
    return ImageUnfit(
        f"image {reference} is built for {built_for}, this engine runs {here}; name an image for {here}, or run the "
        "task where the architecture fits."
    )
