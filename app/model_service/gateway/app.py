"""The gateway as an ASGI application: routes, start and shutdown.

Model calls bypass Starlette's router and middleware: they are most of the traffic, and each layer costs them time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from uuid import UUID, uuid4

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from app.errors import DatabaseUnavailable
from app.ledger.database import Database
from app.model_service.gateway.callers import Callers
from app.model_service.gateway.calls import Call, GatewayServices
from app.model_service.gateway.checks import EndpointChecks
from app.model_service.gateway.conversations import Conversations
from app.model_service.gateway.endpoints import Endpoints, refused
from app.model_service.gateway.engines import ModelEngine, http_client, report_loads, watch_queues
from app.model_service.gateway.keys import Keys
from app.model_service.gateway.metrics import Metrics
from app.model_service.gateway.routes import Routes
from app.model_service.gateway.state import Attempts
from app.model_service.gateway.upstream import Upstream
from app.model_service.gateway.weights import WeightUpdates
from app.model_service.limiter import ModelLimiter
from app.model_service.recording.recorder import Recorder
from app.model_service.serving import CallRefusal, ClientDisconnected, cancel_all
from app.models.model_calls import Dialect
from app.settings import Settings

BODY_BYTES = 32 << 20
"""Largest request body. Longer conversations fit no model; images go by URL or in pieces."""
LAST_S = 2.0
"""Seconds at shutdown to record the calls that it cut."""
_PREFIXES = ("", "/v1", "/v1/v1")
"""Prefixes of paths. Clients differ in whether the base URL has /v1: some leave it out, some add one more."""


class Gateway:
    """The ASGI application. `services` and `routes` exist once it has started."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        *,
        recorder: Callable[[], Recorder],
        limiter: Callable[[], ModelLimiter] | None = None,
        keys: Keys | None = None,
        body_bytes: int = BODY_BYTES,
        base: str | None = None,
    ) -> None:
        """`recorder` and `limiter` are created in the event loop that uses them, and closed when the application stops.

        base: this gateway's URL, one of those in the settings. None: it serves all attempts.
        """
        self._settings = settings
        self._database = database
        self._make_recorder = recorder
        self._make_limiter = limiter or (lambda: ModelLimiter.of(settings, database))
        self._keys = keys or Keys()
        self._body_bytes = body_bytes
        self._base = base
        self._calls = {f"{prefix}/{dialect.value}": dialect for prefix in _PREFIXES for dialect in Dialect}
        handlers = dict.fromkeys((CallRefusal, ClientDisconnected, DatabaseUnavailable), refused)
        self._rest = Starlette(lifespan=self._lifespan, exception_handlers=handlers)
        self.routes: Routes
        self.services: GatewayServices

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            dialect = self._calls.get(scope["path"])
            if dialect is not None:
                await Call(self.services, dialect, scope, receive, send).run()
                return
        await self._rest(scope, receive, send)

    def _paths(self) -> list[Route]:
        endpoints = Endpoints(self.services)
        checks = EndpointChecks(self._http, self.routes, self._keys, self._database)
        quiet_s = self._settings.model_timeout_s
        weights = WeightUpdates(self._http, self.routes, self._keys, self._database, quiet_s=quiet_s)
        routes = [
            Route("/", self._health),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/megaflow/check", checks.answer, methods=["POST"]),
            Route("/megaflow/weights", weights.answer, methods=["POST"]),
            Route("/megaflow/session", endpoints.account),
            Route("/megaflow/session/close", endpoints.close, methods=["POST"]),
        ]
        for prefix in _PREFIXES:
            routes += [
                Route(f"{prefix}/models", endpoints.models),
                Route(f"{prefix}/models/{{name:path}}", endpoints.model),
                Route(f"{prefix}/messages/count_tokens", endpoints.count_tokens, methods=["POST"]),
            ]
        return routes

    async def _health(self, request: Request) -> Response:
        """Returns counts only: every task may call this, and no task needs to know the engines' URLs."""
        healthy = [engine.healthy for engine in self.routes.engines]
        engines = {"up": healthy.count(True), "away": healthy.count(False)}
        return JSONResponse({"status": "ok", "in_flight": self.services.attempts.in_flight, "engines": engines})

    async def _metrics(self, request: Request) -> Response:
        return Response(self.services.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _other_gateway(self, attempt: UUID) -> str | None:
        base = self._base and self._settings.gateway_of(attempt)
        return base if base != self._base else None

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        settings = self._settings
        self._http = http_client(settings.model_timeout_s)
        self.routes = Routes(settings, self._http, self._database)
        callers = Callers(
            self._database, patience_s=min(60.0, settings.gateway_patience_s), other_gateway=self._other_gateway
        )
        metrics = Metrics(lambda: self.routes.engines)
        conversations = Conversations(self._http, self._keys, self._database, metrics.continued)
        upstream = Upstream(self._http, self.routes, self._keys, conversations, timeout_s=settings.model_timeout_s)
        recorder, limiter = self._make_recorder(), self._make_limiter()
        self.services = GatewayServices(
            callers=callers,
            attempts=Attempts(),
            upstream=upstream,
            recorder=recorder,
            limiter=limiter,
            keys=self._keys,
            metrics=metrics,
            patience_s=settings.gateway_patience_s,
            body_bytes=self._body_bytes,
            timeout_s=settings.model_timeout_s,
            boot=uuid4().hex,
            routed=lambda name: name in self.routes.models,
        )
        app.router.routes.extend(self._paths())

        def engines() -> Collection[ModelEngine]:
            return self.routes.engines

        background = {
            "gateway-callers": callers.watch(),
            "engine-loads": watch_queues(self._http, engines),
            "engine-reports": report_loads(self._database, self.services.boot, engines),
        }
        async with AsyncExitStack() as ends:  # in reverse order: calls are recorded first, even if the rest fails
            ends.push_async_callback(self._http.close)
            ends.push_async_callback(limiter.close)
            ends.push_async_callback(self.routes.close)
            ends.push_async_callback(callers.close)
            self.routes.start()
            for name, work in background.items():
                ends.push_async_callback(cancel_all, asyncio.create_task(work, name=name))
            ends.push_async_callback(recorder.close)
            ends.push_async_callback(self.services.attempts.all_ended, LAST_S)
            yield
