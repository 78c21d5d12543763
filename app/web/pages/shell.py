"""A live shell in the environment of an attempt whose agent is at work.

An administrator may open one in every attempt, other users who submit in their own attempts, except where commands run
on the worker's host without isolation. Each shell is recorded with its user, its stream is in the recording, and the
attempt's verdict is suspect: a person may have done the work. The bytes pass through Redis: `app.live_shell`.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from app.errors import MegaFlowError, NotAllowed, SpecInvalid, TooManyRequests
from app.ledger import results
from app.ledger.users import Scope
from app.live_shell import ANSWER_S, IDLE_S, TOTAL_S, ShellLink, ShellRequest, size_of
from app.models.outcome import AttemptRecord
from app.models.spec import IMAGELESS
from app.models.states import AttemptState
from app.web.access import Access, check_form
from app.web.api.attempts import AttemptPlace
from app.web.calls import WebCall, WebServices
from app.web.pages.attempt import attempt_record
from app.web.pages.page import Pages
from app.web.pages.rendering import SHELL_POLICY, PageView

pages = Pages()

_MOST_SHELLS = 3
"""Most shells of one user at once."""


@pages.get("/attempts/{attempt}/shell", Scope.SUBMIT)
def shell(call: WebCall) -> PageView:
    """Shows the terminal, or the reason why there is none."""
    _, result, record = attempt_record(call)
    values = {"task": result, "attempt": record, "problem": "", "hours": TOTAL_S / 3600, "idle": IDLE_S / 60}
    try:
        _refuse(call, record)
    except MegaFlowError as error:
        values["problem"] = str(error)
    return PageView("shell.html", values, headers={"content-security-policy": SHELL_POLICY})


def _refuse(call: WebCall, record: AttemptRecord) -> None:
    """Raises: NotAllowed, SpecInvalid: the caller may have no shell in the attempt, or its agent is not at work."""
    kind = results.task_spec(call.database, attempt_record(call)[1].task_id).task.environment.kind
    if kind in IMAGELESS and not call.caller.administers:
        raise NotAllowed(f"expected an environment with isolation, found {kind.value!r}: for administrators alone")
    phases = {phase.value for phase in record.phases}
    if record.state is not AttemptState.RUNNING or "agent_started" not in phases or "agent_ended" in phases:
        raise SpecInvalid(f"expected an attempt whose agent is at work, found one that is {record.state.value}")


def routes(services: WebServices, access: Access) -> list[WebSocketRoute]:
    """Returns the route of the page's socket."""
    opened = Counter[str]()

    async def answer(socket: WebSocket) -> None:
        try:
            caller = await run_in_threadpool(access.caller, socket, Scope.SUBMIT)
            call = WebCall(services, caller, socket.path_params)
            place, _, record = await run_in_threadpool(attempt_record, call)
            await run_in_threadpool(_refuse, call, record)
            if opened[caller.user_name] >= _MOST_SHELLS:
                raise TooManyRequests(f"expected at most {_MOST_SHELLS} open shells of {caller.user_name}, found more")
        except MegaFlowError as error:
            await socket.send_denial_response(JSONResponse({"error": str(error)}, 403))
            return
        opened[caller.user_name] += 1
        try:
            await socket.accept()
            why = await _had(socket, access, call, place)
            await socket.send_json({"end": why})
            await socket.close()
        except (WebSocketDisconnect, RuntimeError):  # the page was closed
            pass
        finally:
            opened[caller.user_name] -= 1

    return [WebSocketRoute("/attempts/{attempt}/shell/socket", answer)]


async def _had(socket: WebSocket, access: Access, call: WebCall, place: AttemptPlace) -> str:
    """Runs the shell. Returns the reason of its end. Raises: WebSocketDisconnect."""
    try:
        message = json.loads(await asyncio.wait_for(socket.receive_text(), ANSWER_S))
        check_form(call.caller, str(message["csrf"]))
        size = size_of(message["size"])
    except (MegaFlowError, TimeoutError, ValueError, KeyError, TypeError) as error:
        return str(error) or "expected the page's first message, found none"
    request = ShellRequest(str(place.attempt_id), call.caller.user_name, *size)
    link = ShellLink(call.services.settings, request)
    await run_in_threadpool(call.note, "shell.open", place.attempt_id, session=request.session)
    try:
        async with link.open():
            await _first_of(_type(socket, link), _show(socket, access.lasting(socket, call.caller, link.shown())))
    except TooManyRequests as error:
        link.why = str(error)
    except WebSocketDisconnect:
        link.why = "the page was left"
        raise
    finally:
        await run_in_threadpool(call.note, "shell.close", place.attempt_id, link.why, **link.describe())
    return link.why or "you were signed out"


async def _first_of(*several: Coroutine[Any, Any, None]) -> None:
    """Waits until the first one has ended, and cancels the others. Raises: what the first one raises."""
    tasks = [asyncio.create_task(one) for one in several]
    ended, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    while left:  # again: a wait that ends at that moment may lose a cancellation, and redis always waits
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.5)
    for task in ended:
        task.result()


async def _type(socket: WebSocket, link: ShellLink) -> None:
    """Passes input to the shell until the page was closed. Raises: WebSocketDisconnect, TooManyRequests."""
    while (message := await socket.receive())["type"] != "websocket.disconnect":
        if (data := message.get("bytes")) is not None:
            await link.typed(data)
            continue
        try:
            size = size_of(json.loads(message["text"])["size"])
        except (ValueError, KeyError, TypeError):
            raise TooManyRequests("expected a size of the terminal, found something else") from None
        await link.resized(*size)
    raise WebSocketDisconnect


async def _show(socket: WebSocket, pieces: AsyncIterator[bytes]) -> None:
    """Passes output to the page until the shell has ended, or the caller's token is no longer valid."""
    async for piece in pieces:
        if piece:
            await socket.send_bytes(piece)
