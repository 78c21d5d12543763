"""Defines pages: a function, its path and the scope that it needs; forms carry the browser's secret."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qsl

from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from app.errors import SpecInvalid
from app.ledger.users import Scope
from app.model_service.serving import read_body
from app.web.access import CSRF_FIELD, CSRF_HEADER, Access, check_form
from app.web.api.operation import invalid
from app.web.calls import WebCall, WebServices
from app.web.pages.rendering import PageView, render

_FORM_BYTES = 1 << 20
_FIELDS = 100

Answer = Callable[[WebCall], PageView | Response]


@dataclass(frozen=True, slots=True)
class WebPage:
    """A page. The function gets the query, or the form of a POST, as a dictionary in `call.query`."""

    method: str
    path: str
    answer: Answer
    scope: Scope

    async def respond(self, request: Request, services: WebServices, access: Access) -> Response:
        """Checks the caller, then answers. Raises: MegaFlowError, CallRefusal, ClientDisconnected."""
        caller = await run_in_threadpool(access.caller, request, self.scope)
        given = dict(request.query_params)
        if self.method == "POST":
            given = await read_form(request)
            check_form(caller, given.pop(CSRF_FIELD, "") or request.headers.get(CSRF_HEADER, ""))
        call = WebCall(services, caller, request.path_params, query=given, headers=request.headers)
        return await run_in_threadpool(self._answered, call)

    def _answered(self, call: WebCall) -> Response:
        try:
            view = self.answer(call)
        except ValidationError as error:
            if self.method == "POST":  # a field of its form
                raise invalid(error) from error
            raise
        if isinstance(view, Response):
            return view
        web = {"flower": f"http://{call.services.settings.bind}:{call.services.settings.flower_port}"}
        return render(view, call.caller, web)


class Pages(list[WebPage]):
    """Pages; the decorators add functions."""

    def get(self, path: str, scope: Scope = Scope.READ) -> Callable[[Answer], Answer]:
        return self._adds("GET", path, scope)

    def post(self, path: str, scope: Scope = Scope.SUBMIT) -> Callable[[Answer], Answer]:
        return self._adds("POST", path, scope)

    def _adds(self, method: str, path: str, scope: Scope) -> Callable[[Answer], Answer]:
        def add(function: Answer) -> Answer:
            self.append(WebPage(method, path, function, scope))
            return function

        return add


async def read_form(request: Request, most: int = _FORM_BYTES) -> dict[str, str]:
    """Reads the fields of a form. Raises: SpecInvalid; CallRefusal: more than `most` bytes; ClientDisconnected."""
    raw = await read_body(request.receive, request.headers.raw, most)
    try:
        return dict(parse_qsl(raw.decode(), keep_blank_values=True, max_num_fields=_FIELDS))
    except ValueError:
        raise SpecInvalid("expected the fields of a form, found something else; nothing was changed") from None
