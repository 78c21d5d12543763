"""Checks whether processes have ended (a zombie counts as ended), and ends processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Iterable
from contextlib import suppress

import psutil
import structlog
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

log = structlog.get_logger(__name__)

_POLL_S = 0.05


def retrying(fault: type[Exception], timeout_s: float) -> Retrying:
    """Returns a caller of functions: again after a fault, until `timeout_s` have passed; then raises the fault."""
    again = retry_if_exception_type(fault)
    return Retrying(retry=again, stop=stop_after_delay(timeout_s), wait=wait_fixed(_POLL_S), reraise=True)


def has_ended(process: psutil.Process) -> bool:
    """Whether it has ended. A zombie is left to its parent, which on some machines never reaps it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for_end(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Waits until all have ended; returns those still alive after `timeout_s`."""
    give_up = time.monotonic() + timeout_s
    while alive := [process for process in processes if not has_ended(process)]:
        if time.monotonic() > give_up:
            return alive
        time.sleep(_POLL_S)
    return []


def family(pid: int) -> list[psutil.Process]:
    """Returns the process and all its descendants; empty when it has ended."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def end(
    processes: Collection[psutil.Process], number: int, patience_s: float, *, below: Iterable[psutil.Process] = ()
) -> None:
    """Sends a signal to `processes`, and after `patience_s` kills those still alive, including those in `below`."""
    for process in processes:
        _signal(process, number)
    alive = wait_for_end({*processes, *below}, patience_s)
    for process in alive:
        log.warning("process.killed", pid=process.pid)
        _signal(process, signal.SIGKILL)
    wait_for_end(alive, patience_s)


def _signal(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)
