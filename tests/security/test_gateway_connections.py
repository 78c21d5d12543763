"""Connections that send no whole request do not stay open, whoever holds them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from app.model_service import serving
from app.model_service.serving import BoundedProtocol, ConnectionLimits, bounded

REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@dataclass
class _Server:
    """A server with bounds, and connections to it."""

    port: int
    opened: list[asyncio.StreamWriter] = field(default_factory=list)

    async def open(self, content: bytes = b"") -> Streams:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.opened.append(writer)
        writer.write(content)
        return reader, writer


@asynccontextmanager
async def _server(bounds: ConnectionLimits) -> AsyncIterator[_Server]:
    config = uvicorn.Config(_app, port=0, http=bounded(bounds), lifespan="off", log_config=None, backlog=1024)
    server, listener = uvicorn.Server(config), config.bind_socket()
    serving = asyncio.create_task(server._serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    found = _Server(listener.getsockname()[1])
    try:
        yield found
    finally:
        for writer in found.opened:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
        server.should_exit = True
        await serving
        listener.close()


async def _is_closed(reader: asyncio.StreamReader) -> bool:
    """Once the other side has closed it."""
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


async def _answers(streams: Streams) -> bool:
    streams[1].write(REQUEST)
    return (await streams[0].readuntil(b"ok")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{",
    ],
)
async def test_hundreds_of_connections_without_a_whole_request_are_closed(begun: bytes) -> None:
    async with _server(ConnectionLimits(head_s=5, body_s=5)) as server:  # far longer than opening them takes
        held = [await server.open(begun) for _ in range(600)]
        assert await _answers(await server.open()), "others are served meanwhile"
        assert all([await _is_closed(reader) for reader, _ in held])


async def test_a_kept_connection_that_begins_another_request_and_stops_is_closed() -> None:
    async with _server(ConnectionLimits(head_s=0.5)) as server:
        for begun in (b"\r\n", b"GET / HT"):
            reader, writer = streams = await server.open()
            assert await _answers(streams)
            writer.write(begun)
            assert await _is_closed(reader)


async def test_of_too_many_connections_of_one_peer_the_longest_idle_is_closed() -> None:
    async with _server(ConnectionLimits(head_s=60, without_request_most=20)) as server:
        served = await server.open()
        assert await _answers(served)
        held = [await server.open() for _ in range(60)]
        assert all([await _is_closed(reader) for reader, _ in held[:40]])
        assert await _is_closed(served[0])
        for streams in held[41:]:
            assert await _answers(streams)


async def test_a_slow_request_that_goes_on_is_served() -> None:
    async with _server(ConnectionLimits(head_s=5, body_s=5)) as server:
        reader, writer = await server.open(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\n")
        for _ in range(3):
            await asyncio.sleep(0.05)
            writer.write(b"x")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")


def test_our_servers_have_these_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[object] = []

    def config(*arguments: object, **options: object) -> None:
        used.append(options["http"])
        raise InterruptedError

    monkeypatch.setattr(serving, "Config", config)
    with pytest.raises(InterruptedError):
        serving.listen(_app, "test", host="127.0.0.1", port=0, grace_s=1)
    assert isinstance(used[0], type)
    assert issubclass(used[0], BoundedProtocol)
