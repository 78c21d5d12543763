"""Carries the streams of one process of this host until it, or its time, ends."""

from __future__ import annotations

import os
import selectors
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from app.environments.capture import captures
from app.errors import EnvironmentFailed
from app.models.shell import OutputLogs

_AFTER_END_S = 0.5
_AFTER_KILL_S = 5.0
_LOOK_S = 0.02
"""Between two looks whether the process has ended: a stream that stays open, or is closed early, does not tell."""


@dataclass
class Carrier:
    """Streams, deadline and end of one process."""

    process: subprocess.Popen[bytes]
    stdin: bytes | None
    kill: Callable[[], object]
    gone: threading.Event
    logs: OutputLogs | None = None
    command: str = ""

    def __post_init__(self) -> None:
        self.stdout, self.stderr = captures(self.logs, self.command)
        self.timed_out = False
        self._unsent = memoryview(self.stdin or b"")
        self._pipes = [pipe for pipe in (self.process.stdin, self.process.stdout, self.process.stderr) if pipe]

    def finish(self, deadline: float) -> int | None:
        """The exit code (128 + signal when one ended it), or None when `deadline` (monotonic) did."""
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)
        with selectors.DefaultSelector() as selector:
            for pipe in self._pipes:
                selector.register(pipe, selectors.EVENT_WRITE if pipe is self.process.stdin else selectors.EVENT_READ)
            try:
                self._carry(selector, deadline)
            except BaseException:  # a signal, say: nobody will look after it any more
                self.kill()
                raise
            finally:
                self.stdout.close()
                self.stderr.close()
            self._leave([entry.fileobj for entry in selector.get_map().values()])
        try:
            code = self.process.wait(timeout=10)
        except subprocess.TimeoutExpired as error:
            raise EnvironmentFailed(f"process {self.process.pid} was killed and does not end.") from error
        return None if self.timed_out else code if code >= 0 else 128 - code

    def _carry(self, selector: selectors.BaseSelector, deadline: float) -> None:
        until, ended = deadline, False
        while True:
            now = time.monotonic()
            if not ended and self.process.poll() is not None:
                ended, until = True, now + _AFTER_END_S
            if self.gone.is_set():
                self.kill()
                return
            if now >= until and not ended and not self.timed_out:
                self.timed_out, until = True, now + _AFTER_KILL_S
                self.kill()
            elif now >= until or (ended and not _reading(selector)):
                return
            for entry, _ in selector.select(_LOOK_S) if selector.get_map() else _nap():
                self._move(selector, entry.fileobj)

    def _move(self, selector: selectors.BaseSelector, pipe: Any) -> None:
        if not (self._send(pipe) if pipe is self.process.stdin else self._receive(pipe)):
            selector.unregister(pipe)
            pipe.close()

    def _send(self, pipe: Any) -> bool:
        try:
            self._unsent = self._unsent[os.write(pipe.fileno(), self._unsent[: 1 << 16]) :]
        except BlockingIOError:
            return True
        except OSError:  # it reads no more: its affair
            return False
        return bool(self._unsent)

    def _receive(self, pipe: Any) -> bool:
        try:
            data = os.read(pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        (self.stdout if pipe is self.process.stdout else self.stderr).feed(data)
        return bool(data)

    def _leave(self, pipes: list[Any]) -> None:
        """A background process may go on writing: read on and forget, else it would die of a broken pipe."""
        for pipe in pipes:
            if pipe is self.process.stdin or self.gone.is_set():
                pipe.close()
            else:
                threading.Thread(target=_drain, args=(pipe,), daemon=True).start()


def _reading(selector: selectors.BaseSelector) -> bool:
    return any(entry.events & selectors.EVENT_READ for entry in selector.get_map().values())


def _nap() -> tuple[()]:
    time.sleep(_LOOK_S)
    return ()


def _drain(pipe: IO[bytes]) -> None:
    with pipe, suppress(OSError):
        os.set_blocking(pipe.fileno(), True)
        while os.read(pipe.fileno(), 1 << 16):
            pass
