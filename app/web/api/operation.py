"""Defines operations of the API: a function, its method and path, and the models of its query, body and reply."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import iscoroutinefunction
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from app.errors import SpecInvalid, explained
from app.ledger.users import Scope
from app.model_service.serving import read_body
from app.models.wire import Wire
from app.web.access import CSRF_HEADER, SAFE, STRANGERS_BYTES, Access, check_form
from app.web.calls import WebCall, WebServices

PREFIX = "/api/v1"
BODY_BYTES = 64 << 20
"""Most bytes of a request: ten thousand tasks with their problem statements and patches."""
_NAME = re.compile(r"\{(\w+)(?::\w+)?\}")

Answer = Callable[[WebCall], Any]
Function = TypeVar("Function", bound=Answer)


@dataclass(frozen=True)
class Operation:
    """A route. `reply` is the type of the function's result, which becomes JSON, or is a `Response` itself."""

    method: str
    path: str
    answer: Answer
    scope: Scope | None  # None: the function itself checks a secret of the caller
    reply: Any
    query: type[Wire] | None = None
    body: Any = None
    usual: Any = None  # form of large bodies, tried first: telling forms apart reads a body twice
    media_type: str = "application/json"

    @property
    def name(self) -> str:
        return self.answer.__name__

    @property
    def summary(self) -> str:
        return (self.answer.__doc__ or "").strip().splitlines()[0]

    @property
    def parameters(self) -> list[str]:
        return _NAME.findall(self.path)

    @cached_property
    def replies(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.reply)

    @cached_property
    def bodies(self) -> list[TypeAdapter[Any]]:
        return [TypeAdapter(form) for form in (self.usual, self.body) if form is not None]

    async def respond(self, request: Request, services: WebServices, access: Access) -> Response:
        """Checks the caller and the request, then answers. Raises: MegaFlowError, CallRefusal, ClientDisconnected."""
        if self.scope is None:
            caller = access.stranger(request)
        else:
            caller = await run_in_threadpool(access.caller, request, self.scope)
        if request.method not in SAFE:
            check_form(caller, request.headers.get(CSRF_HEADER, ""))
        call = WebCall(services, caller, request.path_params, headers=request.headers)
        if self.query is not None:
            call = replace(call, query=_query(self.query, request))
        if self.body is not None:
            most = BODY_BYTES if self.scope is not None else STRANGERS_BYTES
            raw = await read_body(request.receive, request.headers.raw, most)
            call = replace(call, body=await run_in_threadpool(_body, self.bodies, raw))
        if iscoroutinefunction(self.answer):  # it only waits, so it takes no thread
            access.check_open(caller, "waits")
            with access.counted(caller, "waits"):
                return self._replied(await self.answer(call))
        if self.media_type == "text/event-stream":
            access.check_open(caller, "streams")
        response = await run_in_threadpool(lambda: self._replied(self.answer(call)))
        if isinstance(response, StreamingResponse):
            response.body_iterator = access.lasting(request, caller, response.body_iterator)
        return response

    def _replied(self, found: Any) -> Response:
        if isinstance(found, Response):
            return found
        return Response(to_json(found, inf_nan_mode="null", fallback=str), media_type="application/json")


def _adding(method: str, default: Scope) -> Callable[..., Callable[[Function], Function]]:
    def adds(
        self: Operations, path: str, reply: Any, scope: Scope | None = default, **fields: Any
    ) -> Callable[[Function], Function]:
        def add(function: Function) -> Function:
            self.append(Operation(method, path, function, scope, reply, **fields))
            return function

        return add

    return adds


class Operations(list[Operation]):
    """Operations in the order of their definition; the decorators add functions."""

    get, post = _adding("GET", Scope.READ), _adding("POST", Scope.SUBMIT)
    put, delete = _adding("PUT", Scope.ADMINISTER), _adding("DELETE", Scope.ADMINISTER)


def _query(model: type[Wire], request: Request) -> Wire:
    """Raises: SpecInvalid."""
    given: Mapping[str, Any] = request.query_params
    lists = {name for name, field in model.model_fields.items() if "tuple" in str(field.annotation)}
    values = {name: request.query_params.getlist(name) if name in lists else given[name] for name in given}
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise invalid(error, nothing="") from error


def _body(forms: Sequence[TypeAdapter[Any]], raw: bytes) -> Any:
    """Raises: SpecInvalid: with the message of the last form."""
    for form in forms[:-1]:
        with suppress(ValidationError):
            return form.validate_json(raw)
    try:
        return forms[-1].validate_json(raw)
    except ValidationError as error:
        raise invalid(error) from error


def invalid(error: ValidationError, nothing: str = "; nothing was changed") -> SpecInvalid:
    """Returns the first problem as MegaFlow's error. nothing: ends the message for requests that change something."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "the body"
    return SpecInvalid(f"{where}: {explained(first)}; found {first['input']!r:.80}{nothing}")
