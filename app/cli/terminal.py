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
"""Between two looks at the keyboard."""
_GRACE_S = 2.0
"""How long the end of a program that takes no more input may take to be seen."""
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C outside of raw mode, a polite kill, and a terminal that goes away."""
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


def lend(stream: InteractiveProgram, *, until: float) -> int | None:
    """Carry what is typed to the program and show what it writes, until it ends; its exit code.

    None: its time was over (`until`, monotonic), or the terminal has gone. Raises: EnvironmentFailed.
    """
    resized = threading.Event()
    resized.set()  # it may have changed since the program was started
    before = signal.signal(signal.SIGWINCH, lambda *_: resized.set())
    try:
        with _raw():
            ended = _carried(stream, resized, until)
        return stream.wait(_GRACE_S) if ended else None
    finally:
        signal.signal(signal.SIGWINCH, before)


def _carried(stream: InteractiveProgram, resized: threading.Event, until: float) -> bool:
    """Whether the program has ended. Raises: EnvironmentFailed."""
    while time.monotonic() < until:
        try:
            if _shown(stream):
                return True
            typed = _typed()
        except OSError:
            return False  # the terminal has gone
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
    """Whether the program is just ending: then it may refuse what is sent to it."""
    until = time.monotonic() + _GRACE_S
    while time.monotonic() < until:
        if _shown(stream):
            return True
    return False


def _shown(stream: InteractiveProgram) -> bool:
    """Show what it wrote next; whether it has ended. Raises: EnvironmentFailed; OSError: the terminal has gone."""
    piece = stream.read(_LOOK_S)
    view = memoryview(piece or b"")
    while view:
        view = view[os.write(_SCREEN, view) :]
    return piece == b""


def _typed() -> bytes | None:
    """None: nothing; empty: the terminal has gone. Raises: OSError: the same."""
    ready, _, _ = select.select([_KEYBOARD], [], [], 0)
    return os.read(_KEYBOARD, _PIECE_BYTES) if ready else None


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
