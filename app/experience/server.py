"""Hands samples out over HTTP, for trainers in an environment or on a host of their own: docs/reference/experience.md.

PostgreSQL decides what a request gets, as for a trainer in this process. A lost reply costs nothing: its lease
expires, and a commit may be repeated.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar
from uuid import UUID

import structlog
from pydantic import Field, TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.artifacts.base import ArtifactStore
from app.errors import (
    ArtifactMissing,
    ArtifactStoreUnavailable,
    DatabaseUnavailable,
    MegaFlowError,
    SampleRefused,
    SpecInvalid,
    UnknownName,
    explained,
)
from app.experience import files
from app.experience.hand_out import LOOK_S, MOST_GROUPS, content_of
from app.ledger import experience, names, training
from app.ledger.database import Database
from app.ledger.experience import Lease
from app.model_service.serving import CallRefusal, ClientDisconnected, listen, read_body
from app.models.spec import LabelText
from app.models.wire import Wire
from app.settings import Settings
from app.settings_checks import keep_once

log = structlog.get_logger()

BODY_BYTES = 1 << 16
MOST_WAIT_S = 600.0
PARQUET = "application/vnd.apache.parquet"
MSGPACK = "application/msgpack"
LEASE_HEADER = "megaflow-lease"
LEFT_HEADER = "megaflow-groups-left"
_STATUS: dict[type[MegaFlowError], int] = {
    UnknownName: 404,
    SampleRefused: 409,
    ArtifactMissing: 410,
    SpecInvalid: 400,
    DatabaseUnavailable: 503,
    ArtifactStoreUnavailable: 503,
}

Name = Annotated[LabelText, Field(min_length=1)]
_NAMES: TypeAdapter[str] = TypeAdapter(Name)


class BatchRequest(Wire):
    consumer: Name
    groups: int = Field(ge=1, le=MOST_GROUPS, strict=True)
    wait_s: float = Field(default=0.0, ge=0, le=MOST_WAIT_S, strict=True)
    max_staleness: int | None = Field(default=None, ge=0, le=1_000_000, strict=True)


class VersionRequest(Wire):
    """Request to commit, or to publish a version."""

    version: Name


class ReleaseRequest(Wire):
    consumer: Name


AnyRequest = TypeVar("AnyRequest", bound=Wire)


class ExperienceServer:
    """The routes over one ledger and artifact store, for all runs that feed a trainer."""

    def __init__(self, database: Database, store: ArtifactStore, *, token: str, lease_s: float) -> None:
        self._database = database
        self._store = store
        self._token = token.encode()
        self._lease_s = lease_s
        self.app = Starlette(
            routes=[
                self._route("/runs/{run}/batches", self._batch),
                self._route("/runs/{run}/release", self._release),
                self._route("/leases/{lease}/renew", self._renew),
                self._route("/leases/{lease}/commit", self._commit),
                self._route("/policies/{policy:path}/versions", self._publish),
            ],
            exception_handlers={MegaFlowError: _failed, CallRefusal: _too_large, HTTPException: _no_such},
        )

    def _route(self, path: str, answer: Callable[[Request], Awaitable[Response]]) -> Route:
        async def checked(request: Request) -> Response:
            token = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(token.encode(), self._token):
                actual = "another" if token else "none"
                message = f"expected `Authorization: Bearer` with the server's token, found {actual}"
                return _error(401, "Unauthorized", f"{message}; it is in MEGAFLOW_EXPERIENCE_TOKEN or home/run")
            try:
                return await answer(request)
            except ClientDisconnected:
                return Response(status_code=499)

        return Route(path, checked, methods=["POST"])

    async def _batch(self, request: Request) -> Response:
        body = await _read(request, BatchRequest)
        run_id = await run_in_threadpool(names.find, self._database, "runs", _named(request, "run"))
        until = time.monotonic() + body.wait_s
        while True:
            lease = await run_in_threadpool(self._lease, run_id, body)
            reply: Response | None = None
            if lease is not None:
                reply = await run_in_threadpool(self._reply, lease, MSGPACK in request.headers.get("accept", ""))
            elif time.monotonic() >= until or await request.is_disconnected():
                reply = Response(status_code=204)
            if reply is not None:
                reply.headers[LEFT_HEADER] = str(await run_in_threadpool(training.groups_left, self._database, run_id))
                return reply
            await asyncio.sleep(LOOK_S)

    def _lease(self, run_id: UUID, asked: BatchRequest) -> Lease | None:
        return experience.next_batch(
            self._database,
            run_id,
            asked.consumer,
            groups=asked.groups,
            lease_s=self._lease_s,
            max_staleness=asked.max_staleness,
        )

    def _reply(self, lease: Lease, pack: bool) -> Response | None:
        if (content := content_of(self._database, self._store, lease)) is None:
            return None
        content, kind = (files.packed(content), MSGPACK) if pack else (content, PARQUET)
        return Response(content, media_type=kind, headers={LEASE_HEADER: str(lease.id)})

    async def _renew(self, request: Request) -> Response:
        def renew() -> None:
            experience.renew(self._database, lease, lease_s=self._lease_s)

        lease = _lease_of(request)
        await run_in_threadpool(renew)
        return JSONResponse({"lease": str(lease), "lease_s": self._lease_s})

    async def _commit(self, request: Request) -> Response:
        body, lease = await _read(request, VersionRequest), _lease_of(request)
        await run_in_threadpool(experience.commit, self._database, lease, body.version)
        return JSONResponse({"lease": str(lease), "version": body.version})

    async def _release(self, request: Request) -> Response:
        body = await _read(request, ReleaseRequest)
        run_id = await run_in_threadpool(names.find, self._database, "runs", _named(request, "run"))
        await run_in_threadpool(experience.release, self._database, run_id, body.consumer)
        return JSONResponse({"run": str(run_id)})

    async def _publish(self, request: Request) -> Response:
        body, policy = await _read(request, VersionRequest), _named(request, "policy")
        number = await run_in_threadpool(experience.publish_for_run, self._database, policy, body.version)
        return JSONResponse({"policy": policy, "version": body.version, "number": number})


async def _read(request: Request, shape: type[AnyRequest]) -> AnyRequest:
    """Reads the body. Raises: SpecInvalid; CallRefusal: it is too large."""
    raw = await read_body(request.receive, request.headers.raw, BODY_BYTES)
    try:
        return shape.model_validate_json(raw)
    except ValidationError as error:
        raise _wrong(error) from error


def _wrong(error: ValidationError) -> SpecInvalid:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "the body"
    return SpecInvalid(f"{where}: {explained(first)}; found {first['input']!r:.80}")


def _named(request: Request, what: str) -> str:
    """Returns a name from the path. Raises: SpecInvalid: it is not a valid name."""
    try:
        return _NAMES.validate_python(request.path_params[what])
    except ValidationError as error:
        raise _wrong(error) from error


def _lease_of(request: Request) -> UUID:
    """Raises: UnknownName."""
    try:
        return UUID(request.path_params["lease"])
    except ValueError:
        raise UnknownName(f"expected a lease's id, found {request.path_params['lease'][:80]!r}") from None


def _error(status: int, kind: str, message: str) -> Response:
    return JSONResponse({"error": {"type": kind, "message": message}}, status_code=status)


def _failed(request: Request, error: Exception) -> Response:
    status = next((number for kind, number in _STATUS.items() if isinstance(error, kind)), 500)
    return _error(status, type(error).__name__, str(error))


def _too_large(request: Request, error: Exception) -> Response:
    return _error(413, "SpecInvalid", str(error).partition(";")[0])


def _no_such(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"expected a POST to a route of docs/reference/experience.md, found {request.method} {request.url.path}"
    return _error(error.status_code, "UnknownName", message[:500])


def token_of(settings: Settings) -> str:
    """Returns the token of the settings, or one that is made once in `home`/run, readable by its owner alone."""
    if settings.experience_token is not None:
        return settings.experience_token.get_secret_value()
    return keep_once(settings.home / "run" / "experience_token", secrets.token_urlsafe(24))


def serve(server: ExperienceServer, *, host: str, port: int) -> None:
    """Serves until SIGTERM or SIGINT."""
    listen(server.app, "experience", host=host, port=port, grace_s=5)
