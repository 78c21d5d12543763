"""A program of this host that is talked to while it runs, with pipes or a terminal."""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from app.environments.processes import HostView, Tree, kill_tree
from app.errors import EnvironmentFailed

_LOOK_S = 0.02
_ON_TERMINAL = ["/bin/sh", "-c", 'exec "$@" < "$0" > "$0" 2>&1']
"""Whoever leads a session and opens a terminal has it from then on. `$0` is the terminal."""


class LocalInteractive:
    """A running process. `mark` is what it and all that it starts carry."""

    def __init__(
        self, argv: list[str], cwd: Path, env: Mapping[str, str], mark: str, *, size: tuple[int, int] | None
    ) -> None:
        """`size`: rows and columns of its terminal; None: pipes. Raises: EnvironmentFailed: it cannot be started."""
        if shutil.which(argv[0], path=env.get("PATH")) is None:
            raise EnvironmentFailed(f"cannot start {argv[0]}: no such program.")
        self._mark = mark
        self._lock = threading.Lock()
        self._kept: list[bytes] = []  # read while somebody waited for the end
        self._closed = self._ended = self._input_closed = False
        self._terminal = size is not None
        (self._output, self._input), theirs = _terminal() if self._terminal else _pipes()
        try:
            if size is not None:
                argv = [*_ON_TERMINAL, os.ttyname(theirs[0]), *argv]
                self.resize(*size)
            self._process = subprocess.Popen(  # noqa: S603 - running what the task says is the purpose
                argv,
                cwd=cwd,
                env=dict(env),
                stdin=theirs[0],
                stdout=theirs[1],
                stderr=theirs[1],
                start_new_session=True,
            )
        except OSError as error:
            _close(self._output, self._input)
            raise EnvironmentFailed(f"cannot start {argv[0]}: {error}") from error
        finally:
            _close(*theirs)

    def read(self, timeout_s: float | None = None) -> bytes | None:
        if self._kept:
            return self._kept.pop(0)
        return self._read(timeout_s)

    def _read(self, timeout_s: float | None) -> bytes | None:
        with self._open():
            if self._ended:
                return b""
            poll = select.poll()
            poll.register(self._output, select.POLLIN)
            if not poll.poll(None if timeout_s is None else timeout_s * 1000):
                return None
            try:
                data = os.read(self._output, 1 << 16)
            except OSError:  # how a terminal says that nobody is there any more
                data = b""
            self._ended = not data
            return data

    def write(self, data: bytes) -> None:
        with self._open():
            view = memoryview(data)
            while view:
                view = view[os.write(self._input, view) :]

    def close_input(self) -> None:
        with self._open():
            if self._terminal:
                os.write(self._input, b"\x04")
            elif not self._input_closed:
                self._input_closed = True
                os.close(self._input)

    def resize(self, rows: int, columns: int) -> None:
        with self._open():
            fcntl.ioctl(self._output, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def signal(self, number: int) -> None:
        with self._open():
            os.killpg(self._process.pid, signal.Signals(number))

    def wait(self, timeout_s: float | None = None) -> int | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (code := self._process.poll()) is None:
            left_s = _LOOK_S if deadline is None else min(_LOOK_S, deadline - time.monotonic())
            if left_s <= 0:
                return None
            if self._ended:
                time.sleep(left_s)
            elif piece := self._read(left_s):
                self._kept.append(piece)
        return code if code >= 0 else 128 - code

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._process.poll() is None:
            kill_tree(HostView(), Tree(self._mark))
            self._process.wait(timeout=10)
        _close(self._output, *(() if self._input_closed else (self._input,)))

    @contextmanager
    def _open(self) -> Iterator[None]:
        if self._closed:
            raise EnvironmentFailed("this stream was closed.")
        try:
            yield
        except OSError as error:
            raise EnvironmentFailed(f"the program cannot be reached any more: {error}") from error


def _terminal() -> tuple[tuple[int, int], tuple[int, int]]:
    """Our end for output and for input, and the program's."""
    ours, theirs = os.openpty()
    return (ours, os.dup(ours)), (theirs, os.dup(theirs))


def _pipes() -> tuple[tuple[int, int], tuple[int, int]]:
    output, their_output = os.pipe()
    their_input, input_ = os.pipe()
    return (output, input_), (their_input, their_output)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)
