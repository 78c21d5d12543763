"""Tells whether a process has ended; a zombie has."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil

_POLL_S = 0.05


def has_ended(process: psutil.Process) -> bool:
    """Whether it runs no more. A zombie is left to its parent, which on some machines never comes for it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for_end(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait for all to end; returns those that have not after `timeout_s`."""
    give_up = time.monotonic() + timeout_s
    while alive := [process for process in processes if not has_ended(process)]:
        if time.monotonic() > give_up:
            return alive
        time.sleep(_POLL_S)
    return []
