"""Slots of a host: how many hold one, who waits where, and what a fork knows of it."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.host import slots
from app.host.slots import HostSemaphore


def test_only_so_many_hold_one_and_everybody_comes_through(tmp_path: Path) -> None:
    inside, most, lock = 0, 0, threading.Lock()

    def one(_: int) -> None:
        nonlocal inside, most
        with HostSemaphore(tmp_path / "slots").hold("starts", 3, timeout_s=60):
            with lock:
                inside += 1
                most = max(most, inside)
            time.sleep(0.005)
            with lock:
                inside -= 1

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(one, range(60)))
    assert most == 3


def test_a_holder_in_another_process_counts(tmp_path: Path) -> None:
    file = slots._lock_one(tmp_path / "limit-of-a-host", 1)  # as another process would
    assert file is not None
    with pytest.raises(TimeoutError, match="limit-of-a-host"):
        HostSemaphore(tmp_path).hold("limit:of:a:host", 1, timeout_s=0.05).__enter__()
    os.close(file)
    again = HostSemaphore(tmp_path).hold("limit:of:a:host", 1, timeout_s=0.05)
    with (
        HostSemaphore(tmp_path).hold("limit:of:a:host", 1, timeout_s=0),
        pytest.raises(TimeoutError, match="limit-of-a-host"),
        again,
    ):
        pass
