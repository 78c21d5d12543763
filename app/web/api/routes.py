"""Defines the Starlette routes of all operations and of the OpenAPI document."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.web.access import Access
from app.web.api import administration, attempts, events, hosts, reports, runs
from app.web.api.document import document
from app.web.api.operation import PREFIX, Operation
from app.web.calls import WebServices

OPERATIONS: tuple[Operation, ...] = (
    *runs.operations,
    *attempts.operations,
    *reports.operations,
    *events.operations,
    *administration.operations,
    *hosts.operations,
)


def routes(services: WebServices, access: Access) -> list[Route]:
    """Returns a route for each operation, and for the document."""

    def route(one: Operation) -> Route:
        async def answer(request: Request) -> Response:
            return await one.respond(request, services, access)

        return Route(PREFIX + one.path, answer, methods=[one.method], name=f"api_{one.name}")

    described = document(OPERATIONS, _version())

    async def openapi(request: Request) -> Response:
        return JSONResponse(described)

    return [Route(f"{PREFIX}/openapi.json", openapi, name="api_document"), *(route(one) for one in OPERATIONS)]


def _version() -> str:
    try:
        return version("megaflow")
    except PackageNotFoundError:  # run from its folder, not installed
        return "unknown"
