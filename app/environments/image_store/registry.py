"""Talking to image registries, through the engine: it knows their addresses, certificates, proxies and logins.

A registry that is busy or has a fault of the moment is asked again, later and later, or when it said to.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from functools import lru_cache
from typing import Any, TypeVar

import requests
import structlog
from docker import auth
from docker.credentials import StoreError
from docker.errors import DockerException
from docker.utils import parse_repository_tag
from tenacity import RetryCallState, Retrying, retry_if_exception, wait_random_exponential

from app.environments.disk import no_space
from app.environments.engine import Engine
from app.environments.image_store.names import HUB, located, manifest_of
from app.errors import (
    DiskFull,
    EnvironmentFailed,
    ImageDenied,
    ImageMissing,
    ImageUnavailable,
    ImageUnfit,
    SettingsInvalid,
)
from app.settings import Settings

log = structlog.get_logger()

_T = TypeVar("_T")

_TRIES = 6
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
_ASK_S = 5.0
_HUB_SERVER = "registry-1.docker.io"
COMPATIBLE = {("amd64", "386"), ("arm64", "arm")}
"""What an engine runs beside its own architecture."""


class Refusal(StrEnum):
    """Why a registry did not give or take an image."""

    ABSENT = "absent"  # it has no such image
    DENIED = "denied"  # nobody is logged in, or may not
    BUSY = "busy"  # too many requests, or a fault of its own: try again
    PLATFORM = "platform"  # it has the image, but not for this engine's architecture
    OTHER = "other"


_SIGNS: tuple[tuple[Refusal, re.Pattern[str]], ...] = (
    (Refusal.PLATFORM, re.compile(r"no matching manifest|does not match the specified platform", re.I)),
    (
        Refusal.BUSY,
        re.compile(
            r"toomanyrequests|too many requests|\b(?:HTTP|status|status code):? (?:429|5\d\d)\b"
            r"|internal server error|bad gateway|service unavailable|gateway time-?out|i/o timeout|handshake timeout"
            r"|connection reset|unexpected EOF",
            re.I,
        ),
    ),
    (
        Refusal.DENIED,
        re.compile(r"unauthorized|access denied|denied:|no basic auth|authentication required|HTTP 403", re.I),
    ),
    (Refusal.ABSENT, re.compile(r"manifest unknown|name unknown|not found|does not exist", re.I)),
)


def refusal_of(said: str) -> Refusal:
    """What a message of an engine about a registry means."""
    return next((refusal for refusal, sign in _SIGNS if sign.search(said)), Refusal.OTHER)


class Refused(ImageUnavailable):
    """A registry said no. `said`: its words, as the engine passes them on."""

    def __init__(self, doing: str, said: str, refusal: Refusal | None = None) -> None:
        super().__init__(f"{doing}: {said}")
        self.said = said
        self.refusal = refusal or refusal_of(said)

    @property
    def kind(self) -> type[ImageUnavailable]:
        """The class that the failure table knows."""
        return _KINDS.get(self.refusal, ImageUnavailable)


_KINDS: dict[Refusal, type[ImageUnavailable]] = {Refusal.ABSENT: ImageMissing, Refusal.DENIED: ImageDenied}


def together(kinds: Iterable[type[ImageUnavailable]]) -> type[ImageUnavailable]:
    """What it means for a task that all who may have its image refused it, each in one of these ways."""
    found = set(kinds)
    if found == {ImageMissing}:
        return ImageMissing
    return ImageDenied if ImageDenied in found and found <= {ImageDenied, ImageMissing} else ImageUnavailable


@dataclass(frozen=True, slots=True)
class Found:
    """An image as a registry describes it. `platforms`: `linux/amd64`, …; empty when it does not say."""

    digest: str
    platforms: tuple[str, ...]


class Registries:
    """The registries that an engine can reach, with the logins of the engine's client and of the settings.

    Raises (every method): Refused; DiskFull; EngineUnavailable.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings

    def pull(self, reference: str, deadline: float) -> None:
        """Have it on the engine. `deadline`: monotonic seconds."""
        name, tag = parse_repository_tag(reference)

        def once() -> None:
            steps = self._engine.api.pull(
                name, tag=tag or "latest", stream=True, decode=True, auth_config=self._login(reference)
            )
            self._follow(f"pull {reference}", steps, deadline)

        self._persist(f"pull {reference}", reference, once, deadline)

    def push(self, reference: str, deadline: float) -> None:
        """Put the engine's image of this name into its registry. What the registry has already is not sent again."""
        name, tag = parse_repository_tag(reference)

        def once() -> None:
            steps = self._engine.api.push(
                name, tag=tag or "latest", stream=True, decode=True, auth_config=self._login(reference)
            )
            self._follow(f"push {reference}", steps, deadline)

        self._persist(f"push {reference}", reference, once, deadline)

    def look(self, reference: str, deadline: float) -> Found | None:
        """What the registry has under this name; nothing is pulled. None: it has no such image."""
        doing = f"look for {reference} in its registry"

        def once() -> dict[str, Any]:
            login = self._login(reference)
            answer: dict[str, Any] = self._engine.api.inspect_distribution(reference, login)  # type: ignore[no-untyped-call]
            return answer

        try:
            answer = self._persist(doing, reference, once, deadline)
        except Refused as refused:
            if refused.refusal is Refusal.ABSENT:
                return None
            raise
        told = [f"{p.get('os')}/{p.get('architecture')}" for p in answer.get("Platforms") or []]
        return Found(answer["Descriptor"]["digest"], tuple(told))

    # --- Once, and again --------------------------------------------------------------------------------------------

    def _persist(self, doing: str, reference: str, once: Callable[[], _T], deadline: float) -> _T:
        """Ask until the registry answers, for as long as that can help."""

        def busy(error: BaseException) -> bool:
            return isinstance(error, Refused) and error.refusal is Refusal.BUSY

        def give_up(state: RetryCallState) -> bool:
            return state.attempt_number >= _TRIES or time.monotonic() + state.upcoming_sleep >= deadline

        for attempt in Retrying(
            retry=retry_if_exception(busy),
            wait=_Wait(reference, self._login(reference)),
            stop=give_up,
            before_sleep=lambda state: log.warning("registry.busy", doing=doing, wait_s=round(state.upcoming_sleep, 2)),
            reraise=True,
        ):
            with attempt:
                return self._named(doing, once)
        raise AssertionError("unreachable: the last try returns or raises")

    def _named(self, doing: str, once: Callable[[], _T]) -> _T:
        try:
            with self._engine.named(doing, ImageUnavailable):
                return once()
        except Refused:
            raise
        except ImageUnavailable as error:
            said = str(getattr(error.__cause__, "explanation", None) or error.__cause__ or error)
            raise Refused(doing, said) from error.__cause__

    def _follow(self, doing: str, steps: Iterator[dict[str, Any]], deadline: float) -> None:
        for step in steps:
            if "error" in step:
                said = str(step["error"])
                if no_space(said):
                    raise DiskFull(
                        f"{doing}: the disk is full ({said.strip()}); free some with `megaflow images evict`."
                    )
                raise Refused(doing, said)
            if time.monotonic() > deadline:
                steps.close()  # type: ignore[attr-defined]
                raise Refused(doing, "it took longer than this task allows for its image", Refusal.OTHER)

    def _login(self, reference: str) -> dict[str, str] | None:
        """None: the client of the engine looks into its own configuration (`docker login`)."""
        return login_for(self._settings, located(reference)[0])


def login_for(settings: Settings, registry: str) -> dict[str, str] | None:
    """User name and password for a registry, when the settings have any.

    Raises: SettingsInvalid. What was found is not shown.
    """
    return _given(settings).get(registry)


def logins_of(settings: Settings) -> dict[str, dict[str, str]]:
    """All logins that pulls use, by registry, as a build is told them: the settings' win over those of `docker login`.

    Raises: SettingsInvalid. What was found is not shown.
    """
    found: dict[str, dict[str, str]] = {}
    try:
        found |= auth.load_config().get_all_credentials()  # type: ignore[no-untyped-call]
    except (DockerException, StoreError, OSError) as error:  # most builds need none; a pull would say it
        log.warning("registry.logins_not_read", reason=str(error))
    found |= _given(settings)
    if HUB in found:
        found[auth.INDEX_URL] = found[HUB]
    return found


def _given(settings: Settings) -> dict[str, dict[str, str]]:
    given = settings.registry_auth
    if given is None:
        return {}
    try:
        logins = {str(name): str(login) for name, login in json.loads(given.get_secret_value()).items()}
    except (ValueError, AttributeError):
        raise SettingsInvalid(
            'MEGAFLOW_REGISTRY_AUTH: expected a JSON object {"REGISTRY": "USER:PASSWORD", …}, found something else.'
        ) from None
    split = {name: login.partition(":") for name, login in logins.items()}
    return {name: {"username": user, "password": password} for name, (user, _, password) in split.items()}


class _Wait:
    """How long until the next try: what the registry says, else a random time that grows."""

    def __init__(self, reference: str, login: dict[str, str] | None) -> None:
        self._reference = reference
        self._login = login
        self._grow = wait_random_exponential(multiplier=_FIRST_WAIT_S, max=_LONGEST_WAIT_S)

    def __call__(self, state: RetryCallState) -> float:
        return max(self._grow(state), retry_after_s(self._reference, self._login) or 0.0)


def retry_after_s(reference: str, login: dict[str, str] | None = None) -> float | None:
    """When the registry wants to be asked again, in seconds; None: now, or it does not say.

    The engine keeps a reply's headers to itself, so that the registry is asked once more, for the headers alone.
    """
    host, path = located(reference)
    name, tag = manifest_of(path)
    scheme = "http" if host.partition(":")[0] in ("localhost", "127.0.0.1") else "https"
    url = f"{scheme}://{_HUB_SERVER if host == HUB else host}/v2/{name}/manifests/{tag}"
    credentials = (login["username"], login["password"]) if login else None
    with suppress(requests.RequestException):
        reply = requests.head(url, timeout=_ASK_S, auth=credentials, allow_redirects=False)
        if reply.status_code == 429 or reply.status_code >= 500:
            return seconds(reply.headers.get("Retry-After"))
    return None


def seconds(said: str | None) -> float | None:
    """Either form of the header: seconds, or a date."""
    if said is None:
        return None
    with suppress(ValueError):
        return max(0.0, float(said))
    with suppress(ValueError):
        return max(0.0, (parsedate_to_datetime(said) - datetime.now(UTC)).total_seconds())
    return None


# --- Architecture -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def architecture_of(engine: Engine) -> str:
    """As images spell it: `amd64`, `arm64`.

    Raises: EngineUnavailable, EnvironmentFailed.
    """
    with engine.named("ask for its architecture", EnvironmentFailed):
        return str(engine.api.version()["Arch"])


def refuse_foreign(reference: str, built_for: str, engine: Engine) -> None:
    """Tell before anything starts that an image's programs cannot run on this engine.

    Raises: ImageUnfit.
    """
    here = architecture_of(engine)
    if built_for and built_for != here and (here, built_for) not in COMPATIBLE:
        raise wrong_architecture(reference, built_for, here)


def wrong_architecture(reference: str, built_for: str, here: str) -> ImageUnfit:
    return ImageUnfit(
        f"image {reference} is built for {built_for}, this engine runs {here}; name an image for {here}, or run the "
        "task where the architecture fits."
    )
