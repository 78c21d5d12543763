"""Connects this terminal to a program in an environment: raw mode, resizing, and restoring at the end."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType

from app.errors import EnvironmentFailed
from app.models.shell import InteractiveProgram

_PIECE_BYTES = 1 << 16
_LOOK_S = 0.25
_GRACE_S = 2.0
"""How long the end of a program that takes no more input may take to be seen."""
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_KEYBOARD, _SCREEN = 0, 1


def is_there() -> bool:
    """Whether standard input is a terminal."""
    return sys.stdin.isatty()


def size() -> tuple[int, int]:
    """Rows and columns."""
    try:
        found = os.get_terminal_size(_KEYBOARD)
    except OSError:
        return 24, 80
    return (found.lines, found.columns) if found.lines and found.columns else (24, 80)


class SignalEnding:
    """What would end this process ends the block instead, once: cleaning up is not cut short by a second signal."""

    def __init__(self) -> None:
        self._deaf = False

    def begin(self) -> None:
        """From now on no signal is heeded."""
        self._deaf = True

    def end_once(self, number: int, frame: FrameType | None) -> None:
        """Raises: SystemExit: with the code that a shell would show."""
        if not self._deaf:
            self._deaf = True
            raise SystemExit(128 + number)


@contextmanager
def ending() -> Iterator[SignalEnding]:
    """For the block, Ctrl-C, a polite kill and a terminal that goes away raise SystemExit."""
    made = SignalEnding()
    before = {number: signal.signal(number, made.end_once) for number in _ENDS}
    try:
        yield made
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def lend(stream: InteractiveProgram, *, until: float) -> int | None:
    """Carry what is typed to the program and show what it writes, until it ends; its exit code.

    None: its time was over (`until`, monotonic), or the terminal has gone. Raises: EnvironmentFailed.
    """
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    screen = _Screen(stream, lambda: _wake(waker))
    resized = signal.signal(signal.SIGWINCH, lambda number, frame: _wake(waker))
    try:
        with _raw():
            screen.start()
            screen.unless_ended(lambda: stream.resize(*size()))  # it may have changed since the program was started
            if not _carried(stream, screen, woken, until):
                return None
        screen.refuse_failed()
        return stream.wait(_GRACE_S)
    finally:
        signal.signal(signal.SIGWINCH, resized)
        if screen.stop():
            os.close(woken)
            os.close(waker)


def _carried(stream: InteractiveProgram, screen: _Screen, woken: int, until: float) -> bool:
    """Whether the program has ended."""
    while (left_s := until - time.monotonic()) > 0:
        ready, _, _ = select.select([_KEYBOARD, woken], [], [], left_s)
        if woken in ready:
            os.read(woken, _PIECE_BYTES)
            if screen.ended.is_set():
                return not screen.gone
            screen.unless_ended(lambda: stream.resize(*size()))
        if _KEYBOARD in ready:
            typed = _typed()
            if not typed:
                return False
            screen.unless_ended(partial(stream.write, typed))
    return False


class _Screen:
    """Shows what the program writes, from a thread of its own; `wake` is called at the end."""

    def __init__(self, stream: InteractiveProgram, wake: Callable[[], None]) -> None:
        self.ended = threading.Event()
        self.gone = False  # nobody reads any more
        self._stream = stream
        self._wake = wake
        self._stopped = threading.Event()
        self._failed: EnvironmentFailed | None = None
        self._thread = threading.Thread(target=self._show, name="terminal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> bool:
        """Whether nothing is shown any more: a terminal that is held up (Ctrl-S) takes its time."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(_GRACE_S)
        return not self._thread.is_alive()

    def refuse_failed(self) -> None:
        """Raises: EnvironmentFailed: what ended it was no end of the program."""
        if self._failed is not None:
            raise self._failed

    def unless_ended(self, do: Callable[[], None]) -> None:
        """What is sent to a program that is just ending may be refused. Raises: EnvironmentFailed: it has not ended."""
        try:
            do()
        except EnvironmentFailed:
            if not self.ended.wait(_GRACE_S):
                raise

    def _show(self) -> None:
        try:
            while not self._stopped.is_set():
                piece = self._stream.read(_LOOK_S)
                if piece == b"":
                    break
                _write(piece or b"")
        except EnvironmentFailed as error:
            self._failed = error
        except OSError:
            self.gone = True
        finally:
            self.ended.set()
            self._wake()


def _typed() -> bytes:
    """Nothing when the terminal has gone."""
    try:
        return os.read(_KEYBOARD, _PIECE_BYTES)
    except OSError:
        return b""


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(_SCREEN, view) :]


def _wake(waker: int) -> None:
    with suppress(OSError):  # full: it is being woken already; closed: nobody sleeps
        os.write(waker, b".")


@contextmanager
def _raw() -> Iterator[None]:
    """For the block, every key goes to the program as it is."""
    before = termios.tcgetattr(_KEYBOARD)
    tty.setraw(_KEYBOARD, termios.TCSANOW)
    try:
        yield
    finally:
        with suppress(termios.error):  # it has gone
            termios.tcsetattr(_KEYBOARD, termios.TCSANOW, before)
