"""Authenticates requests: tokens in a header or a cookie, scopes, cross-site requests, rates. docs/howto/web.md."""

from __future__ import annotations

import hashlib
import hmac
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from app.errors import NotAllowed, NotSignedIn, TooManyRequests
from app.ledger import users
from app.ledger.database import Database
from app.ledger.users import Scope, TokenKind

COOKIE = "megaflow_session"
CSRF_FIELD = "csrf"
CSRF_HEADER = "x-csrf-token"
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing."""
STRANGERS_BYTES = 64 << 10
"""Most bytes in the body of a request that carries a secret of its own, or that signs in."""
_REMEMBERED_S = 5.0
"""Seconds that a token is cached without asking the database: a revoked one works no longer than this."""
_REMEMBERED = 4096
_UNCHECKED_S = 30.0
"""Seconds that a stream goes on while the database cannot confirm that its token is valid."""
_STRANGERS_PER_S = 20.0
_RATE_PER_S = 100.0
_BURST = 400.0
_MOST_OPEN = 100
"""Most streams of one user at once, and most waits for the end of tasks."""
_FAILURES_PER_S = 0.2
_FAILURES_BURST = 10.0


@dataclass(frozen=True, slots=True)
class WebUser:
    """The user behind a request, and what the token allows."""

    user_name: str
    scopes: frozenset[Scope]
    session: str = ""  # a browser's secret; empty: a program's token

    @property
    def administers(self) -> bool:
        return Scope.ADMINISTER in self.scopes

    @property
    def submits(self) -> bool:
        return Scope.SUBMIT in self.scopes

    @property
    def csrf(self) -> str:
        """The secret that a form of this browser must carry."""
        return hmac.new(self.session.encode(), b"megaflow form", hashlib.sha256).hexdigest()

    def require(self, scope: Scope) -> None:
        """Raises: NotAllowed."""
        if scope not in self.scopes:
            raise NotAllowed(
                f"expected a token with the scope {scope.value!r}, found one of {self.user_name} with"
                f" {', '.join(sorted(self.scopes))}; an administrator makes tokens: `megaflow users add`"
            )


@dataclass(slots=True)
class _Bucket:
    left: float
    at: float


@dataclass(slots=True)
class Rates:
    """Token buckets by name; the least recently used are dropped."""

    per_s: float
    burst: float
    _buckets: OrderedDict[str, _Bucket] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def allows(self, name: str) -> bool:
        """Whether one more request is within the rate; if so, counts it. Thread-safe."""
        with self._lock:
            now = time.monotonic()
            bucket = self._buckets.pop(name, None) or _Bucket(self.burst, now)
            bucket.left = min(self.burst, bucket.left + (now - bucket.at) * self.per_s)
            bucket.at = now
            self._buckets[name] = bucket
            if len(self._buckets) > _REMEMBERED:
                self._buckets.popitem(last=False)
            if bucket.left < 1.0:
                return False
            bucket.left -= 1.0
            return True


class Access:
    """Finds the caller of a request; caches tokens for some seconds. Thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: OrderedDict[str, tuple[float, WebUser]] = OrderedDict()
        self._rates = Rates(_RATE_PER_S, _BURST)
        self._strangers = Rates(_STRANGERS_PER_S, _BURST)
        self._failures = Rates(_FAILURES_PER_S, _FAILURES_BURST)
        self._open = Counter[tuple[str, str]]()
        self._streams = Counter[tuple[str, TokenKind]]()
        self._lapsed: set[tuple[str, TokenKind]] = set()  # tokens of streams
        self._checked_at = 0.0

    def caller(self, request: HTTPConnection, scope: Scope) -> WebUser:
        """Returns the user of the request or the socket; the token must have the scope.

        Raises: NotSignedIn, NotAllowed, TooManyRequests, DatabaseUnavailable.
        """
        secret, kind = _secret_of(request)
        if not secret:
            raise NotSignedIn("expected `Authorization: Bearer TOKEN` or a signed-in browser, found neither")
        user = self._find(secret, kind, peer_of(request))
        if not self._rates.allows(user.user_name):
            most = f"{_RATE_PER_S:g} requests a second of {user.user_name}"
            raise TooManyRequests(f"expected at most {most}, found more; wait a moment")
        user.require(scope)
        if user.session and _changes(request):
            refuse_other_sites(request)
        return user

    def stranger(self, request: HTTPConnection) -> WebUser:
        """Returns a caller without a user's token; the handler checks the request's secret. Raises: TooManyRequests."""
        if not self._strangers.allows(peer_of(request)):
            raise TooManyRequests(f"expected at most {_STRANGERS_PER_S:g} requests a second, found more; wait a moment")
        return WebUser(peer_of(request), frozenset())

    def _find(self, secret: str, kind: TokenKind, peer: str) -> WebUser:
        key, now = f"{kind.value} {secret}", time.monotonic()
        if (cached := self._known.get(key)) is not None and now - cached[0] < _REMEMBERED_S:
            return cached[1]
        token = users.find_token(self._database, secret, kind)
        if token is None:
            self._known.pop(key, None)
            self.refuse_guessing(peer)
            raise NotSignedIn(
                "expected a valid token, found an unknown or lapsed one; an administrator lists and makes them"
            )
        user = WebUser(token.user_name, token.scopes, secret if kind is TokenKind.SESSION else "")
        self._known[key] = (now, user)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return user

    def check_open(self, caller: WebUser, what: str) -> None:
        """Raises: TooManyRequests: the user has the most streams, or waits, that are allowed."""
        if self._open[what, caller.user_name] >= _MOST_OPEN:
            raise TooManyRequests(
                f"expected at most {_MOST_OPEN} open {what} of {caller.user_name}, found as many already; try again"
                " when one has ended, or ask for several tasks in one request"
            )

    @contextmanager
    def counted(self, caller: WebUser, what: str) -> Iterator[None]:
        """Counts one more of the user's `streams` or `waits` during the block."""
        self._open[what, caller.user_name] += 1
        try:
            yield
        finally:
            self._open[what, caller.user_name] -= 1

    async def lasting(self, request: HTTPConnection, caller: WebUser, pieces: AsyncIterable[Any]) -> AsyncIterator[Any]:
        """Yields a stream while the caller's token is valid; without the database, for some more seconds."""
        token, begun = _secret_of(request), time.monotonic()
        self._streams[token] += 1
        try:
            with self.counted(caller, "streams"):
                async for piece in pieces:
                    if token in self._lapsed or time.monotonic() - max(begun, self._checked_at) > _UNCHECKED_S:
                        return
                    yield piece
        finally:
            self._streams[token] -= 1
            if not self._streams[token]:
                del self._streams[token]
                self._lapsed.discard(token)

    def check_streams(self) -> None:
        """Notes which tokens of open streams are no longer valid, in one query. Raises: DatabaseUnavailable."""
        if open_now := [token for token in list(self._streams) if token[0]]:  # pages without a server have no token
            self._lapsed |= users.lapsed(self._database, open_now)
        self._checked_at = time.monotonic()

    def refuse_guessing(self, peer: str) -> None:
        """Counts a wrong secret from this address. Raises: TooManyRequests: there were many."""
        if not self._failures.allows(peer):
            raise TooManyRequests("expected a valid token, found many wrong ones from this address; wait a minute")

    def forget(self, session: str) -> None:
        """Drops the session of a browser that has signed out."""
        self._known.pop(f"{TokenKind.SESSION.value} {session}", None)
        if (token := (session, TokenKind.SESSION)) in self._streams:
            self._lapsed.add(token)


class Reader(Access):
    """Lets this process read everything, and change nothing: for pages made without a server."""

    def caller(self, request: HTTPConnection, scope: Scope) -> WebUser:
        """Returns the user without the right to submit. Raises: NotAllowed."""
        if _changes(request):
            raise NotAllowed("expected a request that reads, found one that changes something")
        reader = WebUser(users.OWNER, frozenset({Scope.READ, Scope.ADMINISTER}))
        reader.require(scope)
        return reader


def check_form(caller: WebUser, given: str) -> None:
    """Raises: NotAllowed: a browser's form lacks the secret that MegaFlow's pages put into it."""
    if caller.session and not hmac.compare_digest(given.encode(), caller.csrf.encode()):
        raise NotAllowed("expected a form of this site, found one without its secret; reload the page and try again")


def _changes(request: HTTPConnection) -> bool:
    """Whether the request may change something; every socket may."""
    return request.scope.get("method") not in SAFE


def _secret_of(request: HTTPConnection) -> tuple[str, TokenKind]:
    header = request.headers.get("authorization", "")
    if header.lower().startswith("bearer "):
        return header[7:].strip()[:200], TokenKind.TOKEN
    return request.cookies.get(COOKIE, "")[:200], TokenKind.SESSION


def peer_of(request: HTTPConnection) -> str:
    """Returns the client's address."""
    return request.client.host if request.client else ""


def refuse_other_sites(request: HTTPConnection) -> None:
    """Raises: NotAllowed: according to the browser's headers, another site's page sends this."""
    site = request.headers.get("sec-fetch-site", "same-origin")
    origin = request.headers.get("origin")
    try:
        own = urlsplit(origin or "").netloc == request.headers.get("host", "")
    except ValueError:  # not a URL
        own = False
    # Browsers always send an Origin when they open a websocket.
    foreign = not own if origin is not None else request.scope["type"] == "websocket"
    if foreign or site not in ("same-origin", "none"):
        raise NotAllowed("expected a request of this site's own page, found one of another site")
