"""Defines the Starlette routes of all pages, with the streams that update their live parts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from uuid import UUID

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from app.ledger.users import Scope
from app.web.access import Access, WebUser
from app.web.calls import WebCall, WebServices
from app.web.pages import attempt, fleet_pages, overview, run, shell, signing, task, terminal
from app.web.pages.page import WebPage

PAGES: tuple[WebPage, ...] = (
    *overview.pages,
    *run.pages,
    *task.pages,
    *attempt.pages,
    *terminal.pages,
    *shell.pages,
    *fleet_pages.pages,
)


def routes(services: WebServices, access: Access) -> list[BaseRoute]:
    """Returns a route for each page, the routes of signing in, and the streams."""

    def route(one: WebPage) -> Route:
        async def answer(request: Request) -> Response:
            return await one.respond(request, services, access)

        return Route(one.path, answer, methods=[one.method])

    async def fleet_live(request: Request) -> Response:
        caller = await run_in_threadpool(access.caller, request, Scope.READ)
        user = "" if caller.administers else caller.user_name
        found = _stream(services, f"fleet {user}", lambda: overview.fleet_text(services, user))
        return lasting(request, caller, found)

    async def run_live(request: Request) -> Response:
        caller = await run_in_threadpool(access.caller, request, Scope.READ)
        run_id: UUID = await run_in_threadpool(WebCall(services, caller, request.path_params).run)
        return lasting(request, caller, _stream(services, f"run {run_id}", lambda: run.run_text(services, run_id)))

    def lasting(request: Request, caller: WebUser, found: StreamingResponse) -> Response:
        access.check_open(caller, "streams")
        found.body_iterator = access.lasting(request, caller, found.body_iterator)
        return found

    streams = [Route("/live/fleet", fleet_live), Route("/live/runs/{run}", run_live)]
    return [
        *signing.routes(services, access),
        *shell.routes(services, access),
        *streams,
        *(route(one) for one in PAGES),
    ]


def _stream(services: WebServices, key: str, make: Callable[[], str]) -> StreamingResponse:
    async def lines() -> AsyncIterator[bytes]:
        async for text in services.live.texts(key, make):
            if not text:
                yield b": alive\n\n"
                continue
            data = "".join(f"data: {line}\n" for line in text.splitlines())
            yield f"{data}\n".encode()

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
