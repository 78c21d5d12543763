"""The gateway as an ASGI application: routes, start and shutdown, and every path except model calls.

Model calls bypass Starlette's router and middleware: they are most of the traffic, and each layer costs them time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from uuid import UUID, uuid4

import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from app.errors import DatabaseUnavailable
from app.ledger.database import Database
from app.model_service.dialects import codec_for
from app.model_service.gateway.callers import Callers, token_of
from app.model_service.gateway.calls import Call, GatewayServices
from app.model_service.gateway.checks import EndpointChecks
from app.model_service.gateway.conversations import Conversations
from app.model_service.gateway.enforcement import refuse_other_models
from app.model_service.gateway.engines import ModelEngine, http_client, report_loads, watch_queues
from app.model_service.gateway.keys import Keys
from app.model_service.gateway.metrics import Metrics
from app.model_service.gateway.routes import Routes
from app.model_service.gateway.state import AttemptCalls, Attempts
from app.model_service.gateway.upstream import Upstream
from app.model_service.gateway.weights import WeightUpdates
from app.model_service.limiter import ModelLimiter
from app.model_service.recording.recorder import Recorder
from app.model_service.serving import (
    CallRefusal,
    ClientDisconnected,
    cancel_all,
    model_entry,
    read_body,
    read_request,
)
from app.models.model_calls import Dialect, ModelSession
from app.settings import Settings

log = structlog.get_logger()

BODY_BYTES = 32 << 20
"""Largest request body. Longer conversations fit no model; images go by URL or in pieces."""
LAST_S = 2.0
"""Seconds at shutdown to record the calls that it cut."""
_PREFIXES = ("", "/v1", "/v1/v1")
"""Prefixes of paths. Clients differ in whether the base URL has /v1: some leave it out, some add one more."""

CLOSE_S = 10.0
_CLOSE_MOST_S = 120.0
_CHARACTERS = 4
"""Approximate characters per token, in English and in code."""


async def refused(request: Request, error: Exception) -> Response:
    """Returns the response to an error of these endpoints, in the caller's dialect."""
    if isinstance(error, ClientDisconnected):
        return Response(status_code=499)
    if not isinstance(error, CallRefusal):  # the ledger is away
        error = CallRefusal(503, "ledger_unavailable", str(error))
    anthropic = "anthropic-version" in request.headers or request.url.path.endswith("/count_tokens")
    codec = codec_for(Dialect.MESSAGES if anthropic else Dialect.CHAT)
    return JSONResponse(codec.error(error.status, error.code, error.message), status_code=error.status)


class Endpoints:
    """Handlers of requests with an attempt's token. All raise errors that `refused` turns into responses."""

    def __init__(self, services: GatewayServices) -> None:
        self._services = services

    async def account(self, request: Request) -> Response:
        """Returns the attempt's usage so far; `waited_s` includes calls that wait at this moment."""
        return await self._account(await self._session(request, ended_too=True))

    async def close(self, request: Request) -> Response:
        """Refuses new calls, waits for those under way (`?timeout_s=`), records all, and returns the account."""
        session = await self._session(request, ended_too=True)
        timeout_s = _seconds(request.query_params.get("timeout_s"))
        calls = self._services.attempts.of(session.attempt_id)
        calls.close()
        await self._services.callers.close_session(session.attempt_id)
        await _all_ended(calls, timeout_s)
        await self._services.recorder.flush(session.attempt_id)
        response = await self._account(session)
        if not calls.in_flight:
            self._services.recorder.forget(session.attempt_id)
        return response

    async def _session(self, request: Request, *, ended_too: bool = False) -> ModelSession:
        return await self._services.callers.session(token_of(request.scope["headers"]), ended_too=ended_too)

    async def _account(self, session: ModelSession) -> Response:
        """Returns the account as JSON that `app.workers.model_access` reads."""
        account = await self._services.recorder.account(session)
        calls = self._services.attempts.of(session.attempt_id)
        body = asdict(account) | {
            "gateway": self._services.boot,
            "waited_s": account.waited_s + calls.waiting_s(),
            "in_flight": calls.in_flight,
            "waiting": len(calls.waiting_since),
            "attempt_id": str(session.attempt_id),
            "closed": calls.closed or not session.live,
        }
        return JSONResponse(body)

    async def models(self, request: Request) -> Response:
        data = [model_entry(name) for name in await self._names(request)]
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return JSONResponse({"object": "list", "data": data, "has_more": False, "first_id": first, "last_id": last})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        names = await self._names(request)
        if name not in names:
            message = f"unknown model {name!r}; known by name: {', '.join(names) or 'none'}"
            raise CallRefusal(404, "model_not_found", message)
        return JSONResponse(model_entry(name))

    async def _names(self, request: Request) -> list[str]:
        model = (await self._session(request)).model
        return [name for name in dict.fromkeys((model.name, *model.side_models)) if name]

    async def count_tokens(self, request: Request) -> Response:
        """Estimates the tokens: which engine gets the call, and whether it can count, is not known yet."""
        session = await self._session(request)
        self._services.attempts.of(session.attempt_id).refuse_if_closed()
        raw = await read_body(request.receive, request.scope["headers"], self._services.body_bytes)
        refuse_other_models(session, read_request(raw)["model"])
        return JSONResponse({"input_tokens": max(1, len(raw) // _CHARACTERS)})


async def _all_ended(calls: AttemptCalls, timeout_s: float) -> None:
    give_up = time.monotonic() + timeout_s
    while calls.in_flight and (left_s := give_up - time.monotonic()) > 0:
        try:
            await calls.one_end(left_s)
        except TimeoutError:
            log.warning("gateway.calls_outlive_attempt", calls=calls.in_flight)
            return
    await asyncio.sleep(0)


def _seconds(value: str | None) -> float:
    try:
        seconds = CLOSE_S if value is None else float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _CLOSE_MOST_S:
        message = f"timeout_s: expected 0 to {_CLOSE_MOST_S:g} seconds, found {value!r}"
        raise CallRefusal(400, "invalid_request", message)
    return seconds


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
