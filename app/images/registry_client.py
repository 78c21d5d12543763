"""Calls a registry's HTTP interface (version 2) with its token or password."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Any, NoReturn, Self, TypeVar

import requests
import structlog
from tenacity import RetryCallState, Retrying, retry_if_exception, wait_random_exponential

from app.errors import ImageDenied, ImageMissing, ImageUnavailable, MegaFlowError
from app.images.logins import Login
from app.images.references import Reference

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


LISTS = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
SMALL_BYTES = 8 << 20
"""The most of a manifest, a configuration or a message that is read: registries take manifests of 4 MiB."""
_ACCEPT = ", ".join((*LISTS, *MANIFESTS))
_CALL_S = 60.0
_HOW = "`docker login` first, or MEGAFLOW_REGISTRY_AUTH"


class RegistryCalls:
    """To the repository of one image. Not for several threads at once.

    doing: how errors begin. deadline: monotonic seconds. login: asked when the registry wants one.

    Raises (every method): Refused.
    """

    def __init__(self, reference: Reference, doing: str, deadline: float, login: Callable[[], Login] = Login) -> None:
        self._reference = reference
        self._doing = doing
        self._deadline = deadline
        self._login = login
        self._session = requests.Session()
        self._authorisation: str | None = None
        self._fault = ""  # why there is no login

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._session.close()

    def ask(self, kind: str, name: str, *, method: str = "GET", offset: int = 0) -> requests.Response:
        """Its content is still to be read. offset: bytes to leave out; `first_byte` says whether they were."""
        url = f"{self._reference.url}/{kind}/{name}"
        with self.unbroken():
            answer = self._send(method, url, offset)
            # Also for a token that was good before: most last for minutes. Elsewhere, where we were sent on to, nobody
            # is told who we are.
            if answer.status_code == 401 and not answer.history:
                answer.close()
                self._authorisation = self._authorised(answer.headers.get("WWW-Authenticate", ""))
                answer = self._send(method, url, offset)
        if answer.status_code == 416 and offset:  # there is nothing more than that
            answer.close()
            return self.ask(kind, name, method=method)
        if not answer.ok:
            # A blob that is not there is a registry's that is being filled or cleaned.
            absent = RefusalKind.ABSENT if kind == "manifests" else RefusalKind.OTHER
            self._refuse(answer, f"{answer.status_code} for {kind}/{name}", absent=absent)
        return answer

    @contextmanager
    def unbroken(self) -> Iterator[None]:
        """For reading an answer: faults of the connection are refusals, most of them of the moment."""
        try:
            yield
        except requests.RequestException as error:
            broken = (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError)
            of_the_moment = isinstance(error, broken) and "CERTIFICATE_VERIFY_FAILED" not in str(error)
            reason = re.sub(r"\?\S*", "?…", str(error))  # where storage is asked, that is a key to it
            said = f"no whole answer from {self._reference.host} ({type(error).__name__}: {reason})"
            raise RegistryRefusal(
                self._doing, said, RefusalKind.BUSY if of_the_moment else RefusalKind.OTHER
            ) from error

    def _send(self, method: str, url: str, offset: int) -> requests.Response:
        headers = {"Accept": _ACCEPT, "Accept-Encoding": "identity"}  # a blob as it is kept: offsets are of these bytes
        if self._authorisation:
            headers["Authorization"] = self._authorisation
        if offset:
            headers["Range"] = f"bytes={offset}-"
        whole = method == "GET"
        return self._session.request(method, url, headers=headers, allow_redirects=whole, **self._way)

    @property
    def _way(self) -> Mapping[str, Any]:
        left_s = max(0.1, min(_CALL_S, self._deadline - time.monotonic()))
        # Not through the session's own login: it would put a password of ~/.netrc in the place of our token.
        return {"stream": True, "timeout": left_s, "auth": _as_it_is}

    def _refuse(
        self, answer: requests.Response, about: str, advice: str = "", *, absent: RefusalKind = RefusalKind.OTHER
    ) -> NoReturn:
        refusal, after_s = refusal_for(answer.status_code), seconds(answer.headers.get("Retry-After"))
        refusal = absent if refusal is RefusalKind.ABSENT else refusal
        said = f"{about}: {_words(answer)}"
        if refusal is RefusalKind.DENIED and (hint := self._fault or advice):
            said = f"{said}; {hint}"
        raise RegistryRefusal(self._doing, said, refusal, after_s)

    # --- Who we are -----------------------------------------------------------------------------------------------

    def _authorised(self, challenge: str) -> str:
        """What the registry wants to see: a token from where it says, or the password itself."""
        login = self._login()
        self._fault = login.fault
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic" and login.username:
            return login.basic
        if scheme.lower() != "bearer":
            raise RegistryRefusal(self._doing, f"it wants a login: {self._fault or _HOW}", RefusalKind.DENIED)
        asked = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        with self._token_answer(asked, login) as answer:
            if not answer.ok:
                self._refuse(answer, f"no token for it, its token service answered {answer.status_code}", _HOW)
            try:
                found = json.loads(start_of(answer))
                return f"Bearer {found.get('token') or found['access_token']}"
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise RegistryRefusal(
                    self._doing, "expected a token from its token service, found another answer", RefusalKind.OTHER
                ) from error

    def _token_answer(self, asked: Mapping[str, str], login: Login) -> requests.Response:
        params, realm = {name: asked[name] for name in ("service", "scope") if name in asked}, asked.get("realm", "")
        if not realm.lower().startswith("https://") and self._reference.url.startswith("https://"):
            raise RegistryRefusal(
                self._doing, "expected a token service that is spoken to with encryption", RefusalKind.OTHER
            )
        if login.token:
            form = {**params, "grant_type": "refresh_token", "refresh_token": login.token, "client_id": "megaflow"}
            return self._session.post(realm, data=form, allow_redirects=False, **self._way)
        headers = {"Authorization": login.basic} if login.username else {}
        return self._session.get(realm, params=params, headers=headers, **self._way)


def start_of(answer: requests.Response) -> bytes:
    """What it says, cut off a little after `SMALL_BYTES`."""
    found = bytearray()
    for chunk in answer.iter_content(64 << 10):
        found += chunk
        if len(found) > SMALL_BYTES:
            break
    return bytes(found)


def first_byte(answer: requests.Response) -> int | None:
    """Where in the whole an answer's content begins; None: it does not say."""
    if answer.status_code != 206:
        return 0
    said = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range", ""))
    return int(said[1]) if said else None


def _words(answer: requests.Response) -> str:
    with answer, suppress(requests.RequestException, ValueError, LookupError, TypeError):
        return str(json.loads(start_of(answer))["errors"][0]["message"])
    return answer.reason or "no reason given"


def _as_it_is(request: requests.PreparedRequest) -> requests.PreparedRequest:
    return request


log = structlog.get_logger()
