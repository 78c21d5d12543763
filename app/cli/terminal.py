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
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from app.errors import EnvironmentFailed
from app.models.shell import InteractiveProgram

_PIECE_BYTES = 1 << 16
_LOOK_S = 0.02
"""Seconds between two reads of the keyboard."""
_GRACE_S = 2.0
"""Seconds to wait for the end of a program that takes no more input."""
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C outside of raw mode, a normal kill, and a closed terminal."""
_KEYBOARD, _SCREEN = 0, 1


def is_there() -> bool:
    """Whether standard input is a terminal."""
    return sys.stdin.isatty()


def size() -> tuple[int, int]:
    """Returns the terminal's rows and columns; 24 and 80 if they are unknown."""
    try:
        cells = os.get_terminal_size(_KEYBOARD)
    except OSError:
        return 24, 80
    return (cells.lines, cells.columns) if cells.lines and cells.columns else (24, 80)


def lend(stream: InteractiveProgram, *, until: float) -> int | None:
    """Sends typed input to the program and shows its output until it ends; returns its exit code.

    None: its time was over (`until`, monotonic), or the terminal was closed. Raises: EnvironmentFailed.
    """
    resized = threading.Event()
    resized.set()  # the size may have changed since the program started
    before = signal.signal(signal.SIGWINCH, lambda *_: resized.set())
    try:
        with _raw():
            ended = _carried(stream, resized, until)
        return stream.wait(_GRACE_S) if ended else None
    finally:
        signal.signal(signal.SIGWINCH, before)


def _carried(stream: InteractiveProgram, resized: threading.Event, until: float) -> bool:
    """Copies input and output. Whether the program has ended. Raises: EnvironmentFailed."""
    while time.monotonic() < until:
        try:
            if _shown(stream):
                return True
            typed = _typed()
        except OSError:
            return False  # the terminal was closed
        if typed == b"":
            return False
        try:
            if resized.is_set():
                resized.clear()
                stream.resize(*size())
            if typed:
                stream.write(typed)
        except EnvironmentFailed:
            if not _ends(stream):
                raise
            return True
    return False


def _ends(stream: InteractiveProgram) -> bool:
    """Whether the program is just ending: then it may refuse input."""
    until = time.monotonic() + _GRACE_S
    while time.monotonic() < until:
        if _shown(stream):
            return True
    return False


def _shown(stream: InteractiveProgram) -> bool:
    """Shows the next output. Whether the program has ended. Raises: EnvironmentFailed; OSError: terminal closed."""
    piece = stream.read(_LOOK_S)
    view = memoryview(piece or b"")
    while view:
        view = view[os.write(_SCREEN, view) :]
    return piece == b""


def _typed() -> bytes | None:
    """Returns typed input. None: nothing; empty: the terminal was closed. Raises: OSError: the same."""
    ready, _, _ = select.select([_KEYBOARD], [], [], 0)
    return os.read(_KEYBOARD, _PIECE_BYTES) if ready else None


@contextmanager
def _raw() -> Iterator[None]:
    """Sets raw mode for the block: every key goes to the program unchanged."""
    before = termios.tcgetattr(_KEYBOARD)
    tty.setraw(_KEYBOARD, termios.TCSANOW)
    try:
        yield
    finally:
        with suppress(termios.error):  # the terminal was closed
            termios.tcsetattr(_KEYBOARD, termios.TCSANOW, before)
