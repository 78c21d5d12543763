"""Checks before a submission whether a model's engines answer, accept their keys and have the model.

`POST /megaflow/check`: only the gateway has the keys. The caller sends a token that it wrote into the database.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import orjson
import structlog
from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.errors import LimitInvalid
from app.ledger.database import Database
from app.ledger.model_replicas import ANY, plain_url
from app.ledger.model_sessions import use_token
from app.model_service.dialects import codec_for
from app.model_service.gateway import engine_faults
from app.model_service.gateway.callers import token_of
from app.model_service.gateway.engine_faults import whole_of
from app.model_service.gateway.engines import Target
from app.model_service.gateway.keys import Keys, missing_key
from app.model_service.gateway.plans import engine_headers
from app.model_service.gateway.routes import Routes
from app.model_service.serving import CallRefusal, read_body
from app.models.engines import EngineKind
from app.models.model_calls import Dialect
from app.models.spec import ModelChoice, Wire

log = structlog.get_logger()

_TIMEOUT = aiohttp.ClientTimeout(total=10.0, sock_connect=5.0)
_REQUEST_BYTES = 2 << 20
_LIST_BYTES = 16 << 20
_SHOWN = 10
_SMALL: dict[Dialect, dict[str, Any]] = {
    Dialect.CHAT: {"messages": [{"role": "user", "content": "."}], "max_tokens": 1},
    Dialect.MESSAGES: {"messages": [{"role": "user", "content": "."}], "max_tokens": 1},
    Dialect.RESPONSES: {"input": ".", "max_output_tokens": 16},
}
"""Smallest valid call of each dialect."""


class EngineCandidate(Wire):
    """An engine that is about to be registered."""

    url: str
    api_key_env: str | None = None
    upstream_model: str | None = None
    dialects: tuple[Dialect, ...] = ()
    engine: EngineKind = EngineKind.UNKNOWN


class CheckRequest(Wire):
    """Request for a check of the engines that a submission would use, or of one that is not registered yet."""

    model: ModelChoice
    candidate: EngineCandidate | None = None


class CheckReport(Wire):
    """Result of a check. Without `refused` the model can be called, as far as the check shows."""

    refused: str | None = None
    warnings: tuple[str, ...] = Field(default=())
    engine: EngineKind = EngineKind.UNKNOWN  # detected, for a candidate that does not name it


@dataclass(frozen=True, slots=True)
class _EngineProblem:
    """Problem of one engine. `certain`: no call to it could succeed."""

    why: str
    certain: bool = True


AnyRequest = TypeVar("AnyRequest", bound=Wire)


async def control_request(request: Request, database: Database, kind: type[AnyRequest]) -> AnyRequest:
    """Reads a request by a token in the database. Raises: CallRefusal, ClientDisconnected, DatabaseUnavailable."""
    token = token_of(request.scope["headers"])
    if not token or not await asyncio.to_thread(use_token, database, token):
        message = "expected a control token that is in the database and was not used, found another"
        raise CallRefusal(401, "token_unknown", message)
    raw = await read_body(request.receive, request.scope["headers"], _REQUEST_BYTES)
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        raise CallRefusal(400, "invalid_request", f"expected a {kind.__name__}, found: {problems}") from None


class EndpointChecks:
    """Handler of check requests. For one event loop."""

    def __init__(self, http: aiohttp.ClientSession, routes: Routes, keys: Keys, database: Database) -> None:
        self._http = http
        self._routes = routes
        self._keys = keys
        self._database = database

    async def answer(self, request: Request) -> Response:
        """Returns the report as JSON. Raises: CallRefusal, ClientDisconnected, DatabaseUnavailable."""
        check_request = await control_request(request, self._database, CheckRequest)
        return JSONResponse((await self.check(check_request)).model_dump(mode="json"))

    async def check(self, wanted: CheckRequest) -> CheckReport:
        """Checks every engine that may get calls. Raises: DatabaseUnavailable."""
        await self._routes.refresh()
        warnings: list[str] = []
        for name in (wanted.model.name, *wanted.model.side_models):
            try:
                targets = self._targets(wanted, name)
            except (CallRefusal, LimitInvalid) as refusal:
                return CheckReport(refused=self._keys.redact(str(refusal)))
            faults = await asyncio.gather(*(self._engine(target, target.upstream_model or name) for target in targets))
            messages = [self._keys.redact(one.why) for one in faults if one is not None]
            if faults and all(one is not None and one.certain for one in faults):
                return CheckReport(refused="; ".join(messages))
            warnings += messages
        new = wanted.candidate
        unknown = [] if new is None or new.engine else targets
        kinds = [await self._kind(target, wanted.model.name) for target in unknown]
        return CheckReport(warnings=tuple(warnings), engine=kinds[0] if kinds else EngineKind.UNKNOWN)

    def _targets(self, wanted: CheckRequest, name: str) -> list[Target]:
        new = wanted.candidate
        if new is None:
            targets = self._routes.targets(wanted.model.model_copy(update={"name": name}))
            return [target for target in targets if not target.built_in]
        engine = self._routes.engine(plain_url(new.url))
        target = Target(engine, new.upstream_model, "", new.dialects, new.api_key_env, key_expected=True)
        return [] if target.built_in else [target]

    async def _engine(self, target: Target, model: str) -> _EngineProblem | None:
        url = target.engine.url
        key = target.api_key_env
        if target.key_expected and (why := missing_key(self._keys, key)) is not None:
            return _EngineProblem(f"{url}: {why}")
        try:
            page = "?limit=1000" if target.engine.anthropic else ""
            status, content = await self._ask(target, "GET", f"{url}/models{page}")
            if status in {401, 403}:
                return _EngineProblem(self._refused_key(target, status, content))
            if 300 <= status < 400:
                return _EngineProblem(
                    f"{url} answers with a redirect ({status}), which is never followed; use the URL it names"
                )
            listed = _values(content, "id") if status == 200 else None
            if listed is None:
                return await self._one_token(target, model)
            if model == ANY or model in listed or await self._is_known(target, model):
                return None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return _EngineProblem(
                f"{url}: {engine_faults.fault_of_error(error, _TIMEOUT.total or 0).why}; start it, or correct the URL"
            )
        shown = ", ".join(sorted(listed)[:_SHOWN]) or "none"
        more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
        return _EngineProblem(f"{url} does not have the model {model!r}; it lists {shown}{more}")

    async def _kind(self, target: Target, model: str) -> EngineKind:
        """Detects the inference server: vLLM and SGLang name it in `/models`; others get a call for one token id."""
        try:
            _, content = await self._ask(target, "GET", f"{target.engine.url}/models")
            owners = _values(content, "owned_by") or set()
            if owners & {EngineKind.VLLM, EngineKind.SGLANG}:
                return EngineKind(min(owners & {EngineKind.VLLM, EngineKind.SGLANG}))
            name = target.upstream_model or (model if model != ANY else min(_values(content, "id") or {ANY}))
            body = {"model": name, "return_token_ids": True, **_SMALL[Dialect.CHAT]}
            status, content = await self._ask(target, "POST", str(target.engine.path(Dialect.CHAT)), body)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return EngineKind.UNKNOWN
        if status == 422 and b"Unexpected fields" in content:
            return EngineKind.TRANSFORMERS
        if 200 <= status < 300:
            with suppress(ValueError):
                if codec_for(Dialect.CHAT).reply(content, streamed=False).token_ids is not None:
                    return EngineKind.VLLM
            return EngineKind.OPENAI
        return EngineKind.OPENAI if status in {400, 422} else EngineKind.UNKNOWN

    async def _is_known(self, target: Target, model: str) -> bool:
        status, content = await self._ask(target, "GET", f"{target.engine.url}/models/{model}")
        try:
            return status == 200 and isinstance(json.loads(content).get("id"), str)
        except (ValueError, AttributeError):
            return False

    async def _one_token(self, target: Target, model: str) -> _EngineProblem | None:
        url = target.engine.url
        if model == ANY:
            return _EngineProblem(f"{url} has no list of models; it was not checked further", certain=False)
        dialect = _dialect_of(target)
        body = {"model": model, **_SMALL[dialect]}
        status, content = await self._ask(target, "POST", str(target.engine.path(dialect)), body)
        error = engine_faults.message_of(content)
        if status in {401, 403}:
            return _EngineProblem(self._refused_key(target, status, content))
        if engine_faults.unknown_model(status, error, model):
            return _EngineProblem(f"{url} does not have the model {model!r}: {error.message:.300}")
        if status in {404, 405}:
            return _EngineProblem(f"{url} is no model server: it answers {status} to a call; most base URLs end in /v1")
        if 200 <= status < 300:
            return None
        return _EngineProblem(f"{url} has no list of models and answers {status}: {error.message:.300}", certain=False)

    def _refused_key(self, target: Target, status: int, content: bytes) -> str:
        url, key = target.engine.url, target.api_key_env
        problem = f"{url} answers {status}: {engine_faults.message_of(content).message:.300}"
        if key is None:
            return f"{problem}; no key was sent; register one with `megaflow models add NAME {url} --api-key-env VAR`"
        return f"{problem}; {missing_key(self._keys, key) or f'the key in {key} is not accepted'}"

    async def _ask(
        self, target: Target, method: str, url: str, body: dict[str, Any] | None = None
    ) -> tuple[int, bytes]:
        dialect = Dialect.MESSAGES if target.engine.anthropic else _dialect_of(target)
        headers = engine_headers(self._keys, [(b"anthropic-version", b"2023-06-01")], target, dialect)
        data = None if body is None else orjson.dumps(body)
        async with self._http.request(
            method, url, data=data, headers=headers, timeout=_TIMEOUT, allow_redirects=False
        ) as answer:
            return answer.status, await whole_of(answer, _LIST_BYTES) or b""


def _dialect_of(target: Target) -> Dialect:
    return target.dialects[0] if target.dialects else Dialect.CHAT


def _values(content: bytes, key: str) -> set[str] | None:
    """Returns the values of `key` in a list of models. None: the content is no such list."""
    try:
        match json.loads(content):
            case {"data": list(entries)}:
                return {str(entry[key]) for entry in entries if isinstance(entry, dict) and key in entry}
    except (ValueError, RecursionError):
        pass
    return None
