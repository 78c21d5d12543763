"""Connects a user's shell in the browser to the worker that has the environment, through Redis.

Only the worker can open a program in the environment. Redis connects both, so it does not matter on which host the
environment is. Two Redis lists carry the bytes, one per direction; they are bounded and expire by themselves. A worker
that gets no message from the web server for some seconds ends the program.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from uuid import UUID

import redis
import redis.asyncio
import structlog

from app.errors import MegaFlowError, TooManyRequests
from app.models.shell import InteractiveProgram
from app.settings import Settings
from app.stopping import nudge

log = structlog.get_logger()

COMMAND = ("/bin/sh", "-c", "command -v bash >/dev/null 2>&1 && exec bash; exec sh")
TOTAL_S = 3600.0
"""Maximum duration of a shell, in seconds."""
IDLE_S = 600.0
"""Idle limit in seconds: time without input or output."""
ANSWER_S = 15.0
"""Seconds to wait for the worker's first answer."""
_MOST_BYTES = 64 << 20
"""Maximum bytes of input and output of a shell."""
_MOST_SIZE = 500
_PING_S = 2.0
"""Interval of the web server's pings, in seconds."""
_SILENT_S = 20.0
"""Seconds without a message from the web server after which the worker ends the program."""
_LAPSE_S = 120
_LOOK_S = 0.02
"""Seconds between two polls of the input."""
_MOST_PIECES = 64
"""Maximum output entries that wait to be shown; at this number the program has to wait."""
_MOST_AT_ONCE = 4
"""Maximum simultaneous shells of an attempt."""
_DATA, _END, _RESIZE, _PING = b"d", b"e", b"r", b"p"
"""First byte of a list entry: its kind."""


@dataclass(frozen=True, slots=True)
class ShellRequest:
    """Request of a user for a shell in an attempt's environment."""

    attempt_id: str
    user_name: str
    rows: int
    columns: int
    session: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, slots=True)
class ShellKeys:
    """Names of the lists in Redis."""

    installation: str

    def requests(self, attempt_id: object) -> str:
        return f"megaflow:{self.installation}:shells:{attempt_id}"

    def typed(self, session: str) -> str:
        return f"megaflow:{self.installation}:shell:{session}:typed"

    def shown(self, session: str) -> str:
        return f"megaflow:{self.installation}:shell:{session}:shown"


class LiveShells:
    """Users' shells in one environment, on the worker's side. Thread-safe."""

    def __init__(
        self, settings: Settings, attempt_id: UUID, program: Callable[[ShellRequest], InteractiveProgram]
    ) -> None:
        self._settings = settings
        self._keys = ShellKeys(settings.installation)
        self._attempt_id = attempt_id
        self._program = program
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.users: list[str] = []
        """Names of the users who had a shell."""

    def look(self) -> None:
        """Starts a thread that checks for a shell request and serves it."""
        with self._lock:
            self._threads = [one for one in self._threads if one.is_alive()]
            if self._closing.is_set() or len(self._threads) >= _MOST_AT_ONCE:
                return
            self._threads.append(threading.Thread(target=self._serve, name="live-shell", daemon=True))
            self._threads[-1].start()

    def close(self) -> None:
        """Ends all shells."""
        with self._lock:
            self._closing.set()
        for one in self._threads:
            one.join(10)

    def _serve(self) -> None:
        try:
            self._serve_one()
        except redis.RedisError as error:
            log.warning("shell.broken", attempt_id=str(self._attempt_id), reason=str(error))

    def _serve_one(self) -> None:
        """Raises: RedisError."""
        with redis.Redis.from_url(self._settings.redis(), socket_timeout=10) as client:
            entry: Any = client.lpop(self._keys.requests(self._attempt_id))
            if entry is None:
                return
            request = ShellRequest(**json.loads(entry))
            why = "the shell could not be opened"
            try:
                why = self._carried(client, request)
            except MegaFlowError as error:
                why = str(error)[:500]
            except redis.RedisError:
                raise
            except Exception:
                log.exception("shell.failed")
            self._show(client, request.session, _END + why.encode())

    def _carried(self, client: redis.Redis, request: ShellRequest) -> str:
        """Runs a shell until it ends; returns why it ended. Raises: EnvironmentFailed, RedisError."""
        with self._lock:
            self.users.append(request.user_name)
        log.info("shell.opened", user=request.user_name)
        program = self._program(request)
        try:
            return self._carry(client, request.session, program)
        finally:
            program.close()
            log.info("shell.closed", user=request.user_name)

    def _carry(self, client: redis.Redis, session: str, program: InteractiveProgram) -> str:
        begun = heard = time.monotonic()
        waiting = 0
        while not self._closing.is_set():
            now = time.monotonic()
            if now - heard > _SILENT_S or now - begun > TOTAL_S:
                return "its time is over"
            piece = None
            if waiting < _MOST_PIECES:
                piece = program.read(_LOOK_S)
            else:
                time.sleep(_LOOK_S)
            if piece == b"":
                return "the shell has ended"
            if piece:
                self._show(client, session, _DATA + piece)
            with client.pipeline(transaction=False) as pipeline:
                pipeline.lpop(self._keys.typed(session), 64)
                pipeline.llen(self._keys.shown(session))
                entries, waiting = pipeline.execute()
            for entry in entries or ():
                if entry[:1] == _END:
                    return "the page was left"
                heard = now
                self._obey(program, entry)
        return "the agent has ended, and with it what its environment was for"

    def _obey(self, program: InteractiveProgram, entry: bytes) -> None:
        if entry[:1] == _DATA:
            program.write(entry[1:])
        elif entry[:1] == _RESIZE:
            rows, columns = json.loads(entry[1:])
            program.resize(rows, columns)

    def _show(self, client: redis.Redis, session: str, entry: bytes) -> None:
        key = self._keys.shown(session)
        with client.pipeline(transaction=False) as pipeline:
            pipeline.rpush(key, entry)
            pipeline.expire(key, _LAPSE_S)
            pipeline.execute()


def size_of(found: Any) -> tuple[int, int]:
    """Returns rows and columns, limited to their bounds. Raises: ValueError, TypeError."""
    rows, columns = found
    try:
        return min(max(1, int(rows)), _MOST_SIZE), min(max(1, int(columns)), _MOST_SIZE)
    except OverflowError:
        raise ValueError("expected finite numbers of rows and columns, found others") from None


class ShellLink:
    """A shell on the web server's side, bounded in time and bytes. why: the reason of its end."""

    def __init__(self, settings: Settings, request: ShellRequest) -> None:
        self._settings = settings
        self._request = request
        self._keys = ShellKeys(settings.installation)
        self._client = redis.asyncio.Redis.from_url(settings.redis(), socket_connect_timeout=2)
        self._begun = self._moved = time.monotonic()
        self._bytes = 0
        self.why = ""

    def describe(self) -> dict[str, Any]:
        """Returns the shell's figures for the audit record."""
        seconds = round(time.monotonic() - self._begun, 1)
        return {"session": self._request.session, "bytes": self._bytes, "seconds": seconds}

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Requests a shell from the attempt's worker; the block's end closes it. Raises: TooManyRequests: no Redis."""
        request, key = self._request, self._keys.requests(self._request.attempt_id)
        try:
            async with self._client as client:
                entry = json.dumps(asdict(request))
                await client.rpush(key, entry)
                await client.expire(key, int(_SILENT_S))
                await asyncio.to_thread(nudge, self._settings, [UUID(request.attempt_id)])
                try:
                    yield
                finally:
                    await client.lrem(
                        key, 0, entry
                    )  # otherwise an unanswered request would be served before the next user's
                    await self._send(_END)
        except redis.RedisError as error:
            raise TooManyRequests(f"the way to the worker is broken: {type(error).__name__}") from error

    async def typed(self, data: bytes) -> None:
        """Sends input. Raises: TooManyRequests, RedisError."""
        self._count(len(data))
        await self._send(_DATA + data)

    async def resized(self, rows: int, columns: int) -> None:
        """Sends the terminal's new size. Raises: RedisError."""
        await self._send(_RESIZE + json.dumps([rows, columns]).encode())

    async def shown(self) -> AsyncIterator[bytes]:
        """Yields the shell's output until it ends; empty bytes: nothing new. Raises: TooManyRequests, RedisError."""
        answered = False
        while True:
            await self._send(_PING)
            item: Any = await self._client.blpop([self._keys.shown(self._request.session)], timeout=_PING_S)
            now = time.monotonic()
            if now - self._begun > TOTAL_S or now - self._moved > IDLE_S:
                raise TooManyRequests("its time is over, or nothing happened for long; open another")
            if item is None:
                if not answered and now - self._begun > ANSWER_S:
                    raise TooManyRequests(f"its worker did not answer within {ANSWER_S:g} s; the agent may have ended")
                yield b""
                continue
            answered, entry = True, item[1]
            if entry[:1] == _END:
                self.why = entry[1:].decode(errors="replace")
                return
            self._count(len(entry))
            yield entry[1:]

    async def _send(self, entry: bytes) -> None:
        key = self._keys.typed(self._request.session)
        await self._client.rpush(key, entry)
        await self._client.expire(key, _LAPSE_S)

    def _count(self, size: int) -> None:
        self._moved, self._bytes = time.monotonic(), self._bytes + size
        if self._bytes > _MOST_BYTES:
            raise TooManyRequests(f"{_MOST_BYTES >> 20} MiB have passed: enough for one shell; open another")
