"""A program in a container that is talked to over an exec: where no session helper runs."""

from __future__ import annotations

import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from docker.errors import DockerException
from requests import RequestException

from app.environments.engine import Engine
from app.environments.processes import ProcessView, Tree, kill_tree
from app.environments.ways.hijacked import ExecStream
from app.errors import EnvironmentFailed

_LOOK_S = 0.05


class ExecInteractive:
    """A running exec. `mark` is what its processes carry."""

    def __init__(self, engine: Engine, exec_id: str, *, tty: bool, mark: str, view: Callable[[], ProcessView]) -> None:
        self._engine = engine
        self._exec_id = exec_id
        self._tree = Tree(mark, alone=False)
        self._view = view
        self._kept: list[bytes] = []  # read while somebody waited for the end
        self._lock = threading.Lock()
        self._closed = self._ended = self._abandoned = False
        with engine.named("start a program", EnvironmentFailed):
            self._stream = ExecStream(engine.attach(exec_id, tty=tty), framed=not tty, merged=True)
        self._poll = select.poll()
        self._poll.register(self._stream.fileno(), select.POLLIN)

    def read(self, timeout_s: float | None = None) -> bytes | None:
        if self._kept:
            return self._kept.pop(0)
        return self._read(timeout_s)

    def _read(self, timeout_s: float | None) -> bytes | None:
        if self._ended:
            return b""
        if not self._poll.poll(None if timeout_s is None else timeout_s * 1000):
            return None
        buffer = bytearray(1 << 16)
        try:
            got = self._stream.recv_into(memoryview(buffer))
        except OSError:
            got = 0
        self._ended = not got
        return bytes(buffer[:got])

    def write(self, data: bytes) -> None:
        with self._reachable():
            self._stream.sendall(data)

    def close_input(self) -> None:
        with self._reachable():
            self._stream.shutdown(socket.SHUT_WR)

    def resize(self, rows: int, columns: int) -> None:
        with self._reachable():
            self._engine.api.exec_resize(self._exec_id, height=rows, width=columns)

    def signal(self, number: int) -> None:
        with self._reachable():
            view = self._view()
            view.send([p.pid for p in self._tree.living(view.scan(), view.init)], signal.Signals(number))

    def wait(self, timeout_s: float | None = None) -> int | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._reachable():
                record = self._engine.api.exec_inspect(self._exec_id)
            if not record["Running"]:
                return int(record["ExitCode"])
            left_s = _LOOK_S if deadline is None else min(_LOOK_S, deadline - time.monotonic())
            if left_s <= 0:
                return None
            if self._ended:
                time.sleep(left_s)
            elif piece := self._read(left_s):
                self._kept.append(piece)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            with suppress(EnvironmentFailed):  # then it is dead already
                if not self._abandoned:
                    kill_tree(self._view(), self._tree)
        finally:
            self._stream.close()

    @property
    def closed(self) -> bool:
        return self._closed

    def abandon(self) -> None:
        """The container is going, and everything in it: only whoever waits here is woken."""
        self._abandoned = True
        with suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        """What the engine or the stream refuses, in our words."""
        if self._closed or self._abandoned:
            raise EnvironmentFailed(f"this stream was {'closed' if self._closed else 'destroyed'}.")
        try:
            yield
        except (DockerException, RequestException, OSError) as error:
            raise EnvironmentFailed(f"the program cannot be reached any more: {error}") from error
