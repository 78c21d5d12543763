"""What every contender does for the benchmark. Standard library alone: peers' interpreters read this."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")


class Absent(Exception):
    """The contender has no such operation."""


class Live(Protocol):
    """One environment."""

    container: str
    """Its id or name in the engine; empty when no engine knows it."""

    def run(self, command: str) -> tuple[int, bytes]:
        """Exit code (0 where the contender does not tell) and output."""
        ...

    def put(self, path: str, content: bytes) -> None:
        """Raises: Absent."""
        ...

    def get(self, path: str) -> bytes:
        """Raises: Absent."""
        ...

    def stop(self) -> None:
        """End it as the contender does by itself."""
        ...

    ends_quickly: bool
    """`stop` has no grace period: it also serves where nothing is measured."""

    def networks(self) -> list[str]:
        """Names of networks that go with it."""
        ...

    def forget(self) -> None:
        """Somebody else has removed its container and networks."""
        ...


class Simple:
    """What is true of most."""

    ends_quickly = False

    def networks(self) -> list[str]:
        return []

    def forget(self) -> None:
        pass


class WithoutFiles(Simple):
    """For contenders that bring nothing to copy files."""

    def put(self, path: str, content: bytes) -> None:
        raise Absent("it has no way to write a file from bytes or a file")

    def get(self, path: str) -> bytes:
        raise Absent("it has no way to read a file")


class Contender(Protocol):
    """Makes environments from the image that it was constructed with. Called from several threads at once."""

    def start(self) -> Live: ...

    def versions(self) -> dict[str, str]: ...

    def extra(self) -> dict[str, Callable[..., Any]]:
        """Measurements that only this one knows, by name."""
        ...

    def close(self) -> None: ...


class Loop:
    """An event loop in a thread, for contenders whose code is asynchronous. All its tasks share one context."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._context = contextvars.copy_context()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def call(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run it there and wait for its result."""
        future: Future[Result] = Future()

        async def work() -> None:
            try:
                future.set_result(await coroutine)
            except BaseException as error:  # noqa: BLE001 it belongs to the thread that waits
                future.set_exception(error)

        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(work(), context=self._context))
        return future.result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
