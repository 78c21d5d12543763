"""Streams events as server-sent events: the id of each is the stream's position right after it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field
from pydantic_core import to_jsonable_python
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from app.errors import NotAllowed
from app.ledger import stream
from app.ledger.stream import EventFilter, StreamedEvent
from app.models.wire import Wire
from app.web.api.operation import Operations
from app.web.calls import WebCall, WebServices

operations = Operations()


class EventsQuery(Wire):
    """run, task: names; kind: whole kinds, or prefixes that end in a dot; after: `start`, `now` or a position."""

    run: str | None = None
    task: str | None = None
    kind: tuple[str, ...] = Field(default=(), max_length=50)
    after: str = "now"
    follow: bool = True


@operations.get("/events", str, query=EventsQuery, media_type="text/event-stream")
def follow_events(call: WebCall) -> Response:
    """Streams events; `Last-Event-ID` or `after` sets the start. Without a run or a task: for administrators."""
    query: EventsQuery = call.query
    run_id = call.run(query.run) if query.run else None
    task_id = call.task(query.task) if query.task else None
    if run_id is None and task_id is None and not call.caller.administers:
        raise NotAllowed("expected `run` or `task` beside a token without the scope 'administer', found neither")
    stream.check_kinds(query.kind)
    position = stream.place(call.database, call.headers.get("last-event-id") or query.after)
    selection = EventFilter(query.kind, run_id, task_id)
    lines = _lines(call.services, position, selection, follow=query.follow)
    return StreamingResponse(lines, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


async def _lines(services: WebServices, position: Any, wanted: EventFilter, *, follow: bool) -> AsyncIterator[bytes]:
    """Yields the events after the position; with `follow`, also later ones, and comments as signs of life."""
    yield f"id: {position}\n\n".encode()  # a client that loses the connection before the first event resumes here
    async for _ in services.live.changes():
        while True:
            page = await run_in_threadpool(stream.read, services.database, position, stream.PAGE, wanted)
            for one in page.events:
                yield server_sent(one)
            position = page.position
            if len(page.events) < stream.PAGE:
                break
        if not follow:
            return
        yield f": alive\nid: {position}\n\n".encode()


def server_sent(one: StreamedEvent) -> bytes:
    """Formats an event as a server-sent event."""
    body = json.dumps(to_jsonable_python(one.body(), fallback=str))
    return f"id: {one.position}\nevent: {one.event.kind}\ndata: {body}\n\n".encode()
