"""Why a registry did not give or take an image, and asking again one that is busy or has a fault of the moment."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import TypeVar

import structlog
from tenacity import RetryCallState, Retrying, retry_if_exception, wait_random_exponential

from app.errors import ImageDenied, ImageMissing, ImageUnavailable, MegaFlowError

log = structlog.get_logger()

_T = TypeVar("_T")

TRIES = 6
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0


class RefusalKind(StrEnum):
    """Why a registry did not give or take an image."""

    ABSENT = "absent"  # it has no such image
    DENIED = "denied"  # nobody is logged in, or may not
    BUSY = "busy"  # too many requests, or a fault of its own: try again
    PLATFORM = "platform"  # it has the image, but not for this engine's architecture
    OTHER = "other"


_SIGNS: tuple[tuple[RefusalKind, re.Pattern[str]], ...] = (
    (RefusalKind.PLATFORM, re.compile(r"no matching manifest|does not match the specified platform", re.I)),
    (
        RefusalKind.BUSY,
        re.compile(
            r"toomanyrequests|too many requests|\b(?:HTTP|status|status code):? (?:429|5\d\d)\b"
            r"|internal server error|bad gateway|service unavailable|gateway time-?out|i/o timeout|handshake timeout"
            r"|connection reset|unexpected EOF",
            re.I,
        ),
    ),
    (
        RefusalKind.DENIED,
        re.compile(r"unauthorized|access denied|denied:|no basic auth|authentication required|HTTP 403", re.I),
    ),
    (RefusalKind.ABSENT, re.compile(r"manifest unknown|name unknown|not found|does not exist", re.I)),
)


def refusal_of(said: str) -> RefusalKind:
    """What a message of an engine about a registry means."""
    return next((refusal for refusal, sign in _SIGNS if sign.search(said)), RefusalKind.OTHER)


def refusal_for(status: int) -> RefusalKind:
    """What a status of a registry, or of its token service, means."""
    if status == 429 or status >= 500:
        return RefusalKind.BUSY
    return {401: RefusalKind.DENIED, 403: RefusalKind.DENIED, 404: RefusalKind.ABSENT}.get(status, RefusalKind.OTHER)


class RegistryRefusal(ImageUnavailable):
    """A registry said no.

    said: its words, or those of the engine; after_s: when it wants to be asked again, in seconds, if it says so.
    """

    def __init__(self, doing: str, said: str, refusal: RefusalKind | None = None, after_s: float | None = None) -> None:
        super().__init__(f"{doing}: {said}")
        self.doing = doing
        self.said = said
        self.refusal = refusal or refusal_of(said)
        self.after_s = after_s

    @property
    def kind(self) -> type[ImageUnavailable]:
        """The class that the failure table knows."""
        return _KINDS.get(self.refusal, ImageUnavailable)


_KINDS: dict[RefusalKind, type[ImageUnavailable]] = {RefusalKind.ABSENT: ImageMissing, RefusalKind.DENIED: ImageDenied}


def kind_of(error: MegaFlowError) -> type[MegaFlowError]:
    """The class of failure that an error stands for: a refusal says which."""
    return error.kind if isinstance(error, RegistryRefusal) else type(error)


def together(kinds: Iterable[type[MegaFlowError]]) -> type[ImageUnavailable]:
    """What it means for a task that all who may have its image refused it, each in one of these ways."""
    found = set(kinds)
    if found == {ImageMissing}:
        return ImageMissing
    return ImageDenied if ImageDenied in found and found <= {ImageDenied, ImageMissing} else ImageUnavailable


def seconds(said: str | None) -> float | None:
    """Either form of the header `Retry-After`: seconds, or a date; None: neither."""
    if said is None:
        return None
    with suppress(ValueError):
        return max(0.0, float(said))
    with suppress(ValueError, OverflowError):
        when = parsedate_to_datetime(said)
        when = when if when.tzinfo else when.replace(tzinfo=UTC)
        return max(0.0, (when - datetime.now(UTC)).total_seconds())
    return None


# --- Again ------------------------------------------------------------------------------------------------------------


def persist(
    once: Callable[[], _T],
    deadline: float,
    *,
    after_s: Callable[[RegistryRefusal], float | None] = lambda it: it.after_s,
) -> _T:
    """What `once` gives, called again while its registry is busy: after a random time that grows, never before it said.

    deadline: monotonic seconds. after_s: when the registry wants to be asked again.

    Raises: Refused: it is busy after `TRIES` tries, or wants to be left alone beyond the deadline, which is told at
    once. Whatever else `once` raises.
    """
    course = _Course(deadline, after_s)
    retrying = Retrying(
        retry=retry_if_exception(_is_busy),
        wait=course.wait_s,
        stop=course.is_over,
        before_sleep=_log_retry,
        reraise=True,
    )
    try:
        return retrying(once)
    except RegistryRefusal as refused:
        if (why := course.too_late) is None:
            raise
        raise RegistryRefusal(refused.doing, f"{refused.said}; {why}", refused.refusal, refused.after_s) from refused


class _Course:
    """When the next try is, and whether there is one."""

    def __init__(self, deadline: float, after_s: Callable[[RegistryRefusal], float | None]) -> None:
        self.too_late: str | None = None
        self._deadline = deadline
        self._after_s = after_s
        self._asked_s: float | None = None
        self._grow = wait_random_exponential(multiplier=_FIRST_WAIT_S, max=_LONGEST_WAIT_S)

    def wait_s(self, state: RetryCallState) -> float:
        """What was asked for comes before the random time: else all who were told the same would come back at once."""
        refused = state.outcome.exception() if state.outcome else None
        self._asked_s = self._after_s(refused) if isinstance(refused, RegistryRefusal) else None
        return (self._asked_s or 0.0) + self._grow(state)

    def is_over(self, state: RetryCallState) -> bool:
        if state.attempt_number >= TRIES:
            return True
        if time.monotonic() + state.upcoming_sleep < self._deadline:
            return False
        wants = f"it wants to be asked again in {self._asked_s:.0f} s" if self._asked_s else "it is still busy"
        self.too_late = f"{wants}, and this task allows its image no more time"
        return True


def _is_busy(error: BaseException) -> bool:
    return isinstance(error, RegistryRefusal) and error.refusal is RefusalKind.BUSY


def _log_retry(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    log.warning("registry.busy", reason=str(error), wait_s=round(state.upcoming_sleep, 2))
