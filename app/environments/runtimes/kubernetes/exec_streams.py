"""Execs in pods as byte streams: a websocket each, all of a process carried by one thread.

The API server passes on an exec's streams as numbered channels (`v5.channel.k8s.io`, `v4.channel.k8s.io`). Only input
and output are carried here; the last channel's status at the program's end distinguishes an end from a cut.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

import httpx2
from httpx2.websockets import AsyncWebSocketSession, HTTPXWSException, WebSocketDisconnect, WebSocketUpgradeError
from lightkube.config.client_adapter import ConnectionParams
from lightkube.config.kubeconfig import SingleConfig

from app.environments.session.connection import StreamCut

_PROTOCOLS = ["v5.channel.k8s.io", "v4.channel.k8s.io"]
_STDIN, _STDOUT, _STATUS = b"\0", b"\1", b"\3"
_PIECE_BYTES = 64 << 10
_MESSAGE_BYTES = 4 << 20
"""Maximum message size; servers send at most 32 KiB."""
_PING_S = 15.0
"""Ping interval: a proxy may close a silent stream, and a broken way is noticed after twice this time."""
_OPEN_S = 30.0


class PodStream:
    """A running exec as a stream of bytes, polled like a socket. See `ByteStream`.

    A stream cut on its way raises StreamCut where a socket would end: it is unknown what the program inside did, and
    whether it still runs, so no result can be made of it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.cut: str | None = None  # the reason, once it was cut
        self.setblocking, self.shutdown = connection.setblocking, connection.shutdown
        self.fileno = connection.fileno

    def send(self, data: memoryview, /) -> int:
        """Sends like a socket. Raises: OSError."""
        try:
            return self._connection.send(data)
        except BlockingIOError:
            raise
        except OSError:
            self._raise_if_cut()
            raise

    def recv_into(self, buffer: memoryview, /) -> int:
        """Receives like a socket: 0 at the end. Raises: OSError."""
        try:
            size = self._connection.recv_into(buffer)
        except BlockingIOError:
            raise
        except OSError:
            self._raise_if_cut()
            raise
        if not size:
            self._raise_if_cut()
        return size

    def read_line(self, timeout_s: float) -> bytes:
        """Reads the first line, without what follows it. Raises: OSError: none came."""
        line, byte = bytearray(), memoryview(bytearray(1))
        self._connection.settimeout(timeout_s)
        while self.recv_into(byte) and byte[0] != ord("\n"):
            line += byte
        return bytes(line)

    def write(self, data: bytes) -> None:
        """Writes all of it, within `read_line`'s timeout. Raises: OSError."""
        left = memoryview(data)
        while left:
            left = left[self.send(left) :]

    def _raise_if_cut(self) -> None:
        if self.cut is not None:
            raise StreamCut(self.cut)

    def close(self) -> None:
        """Ends it, and with it what it carries: the program inside sees the end of its input."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class PodStreams:
    """Opens execs in the pods of one cluster. Safe for many threads."""

    def __init__(self, config: SingleConfig) -> None:
        self._config = config
        self._loop = asyncio.new_event_loop()
        self._client: httpx2.AsyncClient | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kubernetes-execs", daemon=True)
        self._thread.start()

    def open(self, namespace: str, pod: str, argv: Sequence[str]) -> PodStream:
        """Starts `argv` in the pod's container, with input. Raises: OSError: it cannot be started, or no such pod."""
        inner, outer = socket.socketpair()
        inner.setblocking(False)
        stream = PodStream(outer)
        begin = self._begin(f"api/v1/namespaces/{namespace}/pods/{pod}/exec", list(argv), inner, stream)
        try:
            asyncio.run_coroutine_threadsafe(begin, self._loop).result(_OPEN_S)
        except BaseException as error:
            stream.close()
            if isinstance(error, TimeoutError):
                raise ConnectionError(f"no exec in {pod} within {_OPEN_S:.0f} s") from error
            raise
        return stream

    async def _begin(self, path: str, argv: list[str], inner: socket.socket, stream: PodStream) -> None:
        opened: asyncio.Future[None] = self._loop.create_future()
        carrying = self._loop.create_task(self._carry(path, argv, inner, stream, opened))
        self._running.add(carrying)  # the loop holds tasks weakly
        carrying.add_done_callback(self._running.discard)
        try:
            await opened
        except asyncio.CancelledError:
            carrying.cancel()
            raise

    async def _carry(
        self,
        path: str,
        argv: list[str],
        inner: socket.socket,
        stream: PodStream,
        opened: asyncio.Future[None],
    ) -> None:
        why = "the stream was cut"
        try:
            async with self._made_client().websocket(
                path,
                params={"command": argv, "stdin": "true", "stdout": "true", "stderr": "false", "tty": "false"},
                subprotocols=_PROTOCOLS,
                max_message_size_bytes=_MESSAGE_BYTES,
                keepalive_ping_interval_seconds=_PING_S,
                keepalive_ping_timeout_seconds=_PING_S,
                timeout=httpx2.Timeout(_OPEN_S, read=None, write=None),
            ) as web:
                opened.set_result(None)
                if await _carried(web, self._loop, inner):
                    why = ""
        except WebSocketUpgradeError as error:
            why = f"the API server refuses an exec: {error.response.status_code}"
        except (httpx2.HTTPError, HTTPXWSException, OSError, BaseExceptionGroup) as error:
            why = f"{why} ({_named(error)})"
        finally:
            stream.cut = why or None
            inner.close()
            if not opened.done():
                opened.set_exception(ConnectionError(why))

    def _made_client(self) -> httpx2.AsyncClient:
        """Returns the client, in the loop's thread. Each stream holds a connection, so their number is unlimited."""
        if self._client is None:
            params = ConnectionParams(timeout=httpx2.Timeout(_OPEN_S)).httpx_params(self._config)
            self._client = httpx2.AsyncClient(**params, limits=httpx2.Limits(max_connections=None))
        return self._client


async def _carried(web: AsyncWebSocketSession, loop: asyncio.AbstractEventLoop, inner: socket.socket) -> bool:
    """Carries until one side ends. True: the program inside or our side ended; False: the way between them."""
    coming = loop.create_task(_inwards(web, loop, inner))
    going = loop.create_task(_outwards(web, loop, inner))
    try:
        await asyncio.wait((coming, going), return_when=asyncio.FIRST_COMPLETED)
        if going.done() and going.exception() is not None:  # the input that still comes tells why
            await asyncio.wait((coming,))
            return coming.result()
        return going.done() or coming.result()
    finally:
        coming.cancel()
        going.cancel()
        await asyncio.gather(coming, going, return_exceptions=True)


async def _inwards(web: AsyncWebSocketSession, loop: asyncio.AbstractEventLoop, inner: socket.socket) -> bool:
    while True:
        try:
            message = await web.receive_bytes()
        except WebSocketDisconnect:
            return False
        if message[:1] == _STDOUT:
            await loop.sock_sendall(inner, memoryview(message)[1:])
        elif message[:1] == _STATUS:
            return ended_by_itself(message[1:])


async def _outwards(web: AsyncWebSocketSession, loop: asyncio.AbstractEventLoop, inner: socket.socket) -> None:
    while data := await loop.sock_recv(inner, _PIECE_BYTES):
        await web.send_bytes(_STDIN + data)


def _named(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


def ended_by_itself(status: bytes) -> bool:
    """Whether an exec's last status means that its program has ended; otherwise it reports a fault on the way."""
    try:
        result = json.loads(status)
        return bool(result["status"] == "Success" or result.get("reason") == "NonZeroExitCode")
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
