"""Defines the ASGI application: routes of the API and of the pages, headers of every response, and errors."""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote, urlsplit

import psycopg
import structlog
from sqlalchemy.exc import DataError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from app.errors import (
    ArtifactMissing,
    ArtifactStoreUnavailable,
    BrokerUnavailable,
    DatabaseUnavailable,
    DatasetUnavailable,
    DependencyMissing,
    ExportRefused,
    IdempotencyConflict,
    LimitInvalid,
    MegaFlowError,
    NotAllowed,
    NotSignedIn,
    QuotaExceeded,
    ReportRefused,
    SampleRefused,
    SpecInvalid,
    TooManyRequests,
    UnknownName,
)
from app.ledger.database import Database
from app.model_service.serving import CallRefusal, ClientDisconnected
from app.settings import Settings
from app.web.access import SAFE, Access
from app.web.api import routes as api
from app.web.calls import WebServices
from app.web.pages import routes as pages
from app.web.pages.rendering import POLICY, error_page

log = structlog.get_logger()

STATIC = Path(__file__).parent / "static"
STATUS: Mapping[type[MegaFlowError], int] = {
    NotSignedIn: 401,
    NotAllowed: 403,
    UnknownName: 404,
    IdempotencyConflict: 409,
    ReportRefused: 409,
    ExportRefused: 409,
    SampleRefused: 409,
    ArtifactMissing: 410,
    SpecInvalid: 422,
    LimitInvalid: 422,
    TooManyRequests: 429,
    QuotaExceeded: 429,
    DatabaseUnavailable: 503,
    BrokerUnavailable: 503,
    ArtifactStoreUnavailable: 503,
    DatasetUnavailable: 503,
    DependencyMissing: 501,
}
"""HTTP status by error, the first that fits; others are 500."""


def application(settings: Settings, database: Database, access: Access | None = None) -> Starlette:
    """Returns the application over one ledger. Raises: SettingsInvalid, ArtifactStoreUnavailable."""
    hosts = None if access is not None else hosts_of(settings)
    services, access = WebServices.of(settings, database), access or Access(database)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        services.live.start(access.check_streams)
        yield
        services.live.stop()

    app = Starlette(
        routes=[
            Mount("/static", StaticFiles(directory=STATIC)),
            *api.routes(services, access),
            *pages.routes(services, access),
        ],
        middleware=[
            Middleware(ProxyHeadersMiddleware, trusted_hosts=list(settings.web_proxies)),
            Middleware(_KnownHosts, hosts=hosts),
            Middleware(_Headers),
            Middleware(GZipMiddleware, minimum_size=1000),
        ],
        exception_handlers={
            MegaFlowError: _refused,
            CallRefusal: _too_large,
            ClientDisconnected: _gone,
            HTTPException: _no_such,
            DataError: _not_storable,
            psycopg.DataError: _not_storable,  # of a COPY
            Exception: _failed,
        },
        lifespan=lifespan,
    )
    app.state.services = services
    return app


def hosts_of(settings: Settings) -> frozenset[str]:
    """Returns the server's host names. Another name may belong to a site whose DNS entry leads here."""
    own = urlsplit(settings.web_base()).hostname or ""
    return frozenset({"localhost", own, settings.bind})


class _KnownHosts:
    """Refuses requests for other hosts: allows addresses and the given names. hosts None: allows all."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and self._hosts is not None:
            host = _host_of(HTTPConnection(scope).headers.get("host", ""))
            if host not in self._hosts and not _is_address(host):
                detail = f"found {host[:100]!r}; MEGAFLOW_WEB_URL names the server's address"
                message = f"expected one of the server's hosts, {detail}"
                await PlainTextResponse(message, 421)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _host_of(header: str) -> str:
    """Returns the host name without its port; the header unchanged if it has no valid one."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return header


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class _Headers:
    """Adds the headers that keep a browser from running, framing or sending what it should not."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message["headers"])
                names = {name for name, _ in headers}
                if b"content-security-policy" not in names:
                    headers.append((b"content-security-policy", POLICY.encode()))
                headers += [
                    (b"x-content-type-options", b"nosniff"),
                    (b"referrer-policy", b"same-origin"),
                    (b"cross-origin-opener-policy", b"same-origin"),
                ]
                if b"cache-control" not in names:
                    caching = b"public, max-age=3600" if scope["path"].startswith("/static/") else b"no-store"
                    headers.append((b"cache-control", caching))
                message["headers"] = headers
            await send(message)

        await self._app(scope, receive, sending if scope["type"] == "http" else send)


def _answer(request: Request, status: int, kind: str, message: str) -> Response:
    if request.url.path.startswith("/api/"):
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
        return JSONResponse({"error": {"type": kind, "message": message}}, status_code=status, headers=headers)
    if status == 401 and request.method == "GET":
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(f"/sign-in?next={quote(target, safe='')}", status_code=303)
    return error_page(status, message)


def _refused(request: Request, error: Exception) -> Response:
    status = next((number for kind, number in STATUS.items() if isinstance(error, kind)), 500)
    if status == 500:
        log.error("web.failed", path=request.url.path, error=repr(error))
    return _answer(request, status, type(error).__name__, str(error))


def _too_large(request: Request, error: Exception) -> Response:
    return _answer(request, 413, "SpecInvalid", str(error).partition(";")[0])


def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


def _not_storable(request: Request, error: Exception) -> Response:
    """Answers 422 for values that PostgreSQL cannot hold: a NUL character, a number out of range."""
    nothing = "" if request.method in SAFE else "; nothing was changed"
    return _answer(request, 422, "SpecInvalid", f"expected values that PostgreSQL can hold{nothing}")


def _failed(request: Request, error: Exception) -> Response:
    """Answers 500; the traceback is only in the log."""
    return _answer(request, 500, "MegaFlowError", f"expected no fault, found {type(error).__name__}: the log has more")


def _no_such(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    route = f"{request.method} {request.url.path}"[:300]
    return _answer(request, error.status_code, "UnknownName", f"expected a page or route of this server, found {route}")
