"""Classifies why a registry did not give or take an image, by the messages of an engine or of skopeo."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import TypeVar

import structlog
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_before_delay,
    wait_random_exponential,
)

from app.errors import ImageDenied, ImageMissing, ImageUnavailable, ImageUnfit, MegaFlowError

log = structlog.get_logger()

_T = TypeVar("_T")

TRIES = 6
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0


class RefusalKind(StrEnum):
    """Reason why a registry did not give or take an image."""

    ABSENT = "absent"  # it has no such image
    DENIED = "denied"  # not logged in, or not allowed
    BUSY = "busy"  # too many requests, or a fault of its own: try again
    PLATFORM = "platform"  # it has the image, but not for this architecture
    OTHER = "other"


_SIGNS: tuple[tuple[RefusalKind, re.Pattern[str]], ...] = (
    (
        RefusalKind.PLATFORM,
        re.compile(
            r"no matching manifest|does not match the specified platform"
            r"|no image found in (?:manifest list|image index)",
            re.I,
        ),
    ),
    (
        RefusalKind.BUSY,
        re.compile(
            r"toomanyrequests|too many requests|\b(?:HTTP|status|status code|StatusCode):? (?:429|5\d\d)\b"
            r"|status code from registry (?:429|5\d\d)\b"
            r"|internal server error|bad gateway|service unavailable|gateway time-?out|i/o timeout|handshake timeout"
            r"|connection reset|unexpected EOF",
            re.I,
        ),
    ),
    # A missing blob means that the registry is being filled or cleaned.
    (RefusalKind.OTHER, re.compile(r"(?:fetching|reading) blob.*\b404\b", re.I)),
    (
        RefusalKind.DENIED,
        re.compile(
            r"unauthorized|access denied|denied:|no basic auth|authentication required"
            r"|\b(?:HTTP|StatusCode:) 40[13]\b|status code from registry 40[13]\b|invalid username/password",
            re.I,
        ),
    ),
    (
        RefusalKind.ABSENT,
        re.compile(r"manifest unknown|name unknown|not found|does not exist|\bStatusCode: 404\b", re.I),
    ),
)


def refusal_of(said: str) -> RefusalKind:
    """Classifies a message about a registry."""
    return next((refusal for refusal, sign in _SIGNS if sign.search(said)), RefusalKind.OTHER)


class RegistryRefusal(ImageUnavailable):
    """A registry refused a request. `reason`: its message, or that of the engine or of skopeo."""

    def __init__(self, doing: str, said: str, refusal: RefusalKind | None = None) -> None:
        super().__init__(f"{doing}: {said}")
        self.reason = said
        self.refusal = refusal or refusal_of(said)

    @property
    def kind(self) -> type[ImageUnavailable]:
        """Class of error that the failure table has."""
        return _KINDS.get(self.refusal, ImageUnavailable)


_KINDS: dict[RefusalKind, type[ImageUnavailable]] = {RefusalKind.ABSENT: ImageMissing, RefusalKind.DENIED: ImageDenied}


def kind_of(error: MegaFlowError) -> type[MegaFlowError]:
    """Returns the class of failure that an error stands for; a refusal has its own."""
    return error.kind if isinstance(error, RegistryRefusal) else type(error)


def together(kinds: Iterable[type[MegaFlowError]]) -> type[ImageUnavailable]:
    """Returns a task's class of error when all registries refused its image, each with one of these classes."""
    distinct = set(kinds)
    if distinct == {ImageMissing}:
        return ImageMissing
    return ImageDenied if ImageDenied in distinct and distinct <= {ImageDenied, ImageMissing} else ImageUnavailable


def pull_first(reference: str, candidates: Sequence[str], pull: Callable[[str], _T]) -> _T:
    """Returns the first image that can be pulled of these names, the origin's last. Raises: ImageUnavailable."""
    refusals: list[ImageUnavailable] = []
    for candidate in candidates:
        try:
            return pull(candidate)
        except ImageUnavailable as error:  # a mirror may have it only for other architectures
            refusals.append(error)
    kind = ImageUnfit if isinstance(refusals[-1], ImageUnfit) else together(map(kind_of, refusals))
    raise kind(
        f"image {reference} is not here and could not be pulled ({'; '.join(map(str, refusals))}). Check the reference"
        " and `docker login`, load it with `docker load`, or name a registry that has it in MEGAFLOW_IMAGE_MIRROR."
    ) from refusals[-1]


def persist(once: Callable[[], _T], deadline: float) -> _T:
    """Returns the result of `once`, repeated while its registry is busy, after random, growing delays.

    deadline: monotonic seconds.

    Raises: RegistryRefusal: it is busy after `TRIES` tries, or the next try would be after the deadline; as `once`.
    """
    retrying = Retrying(
        retry=retry_if_exception(_is_busy),
        wait=wait_random_exponential(multiplier=_FIRST_WAIT_S, max=_LONGEST_WAIT_S),
        stop=stop_after_attempt(TRIES) | stop_before_delay(deadline - time.monotonic()),
        before_sleep=_log_retry,
        reraise=True,
    )
    return retrying(once)


def _is_busy(error: BaseException) -> bool:
    return isinstance(error, RegistryRefusal) and error.refusal is RefusalKind.BUSY


def _log_retry(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    log.warning("registry.busy", reason=str(error), wait_s=round(state.upcoming_sleep, 2))
