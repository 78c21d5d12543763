"""Slots of a host: how many hold one, who waits where, and what a fork knows of it."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from app.host import slots
from app.host.slots import HostSemaphore
from app.settings import Settings
from app.workers import host_care


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


def cared(settings: Settings, stop: threading.Event) -> threading.Thread:
    thread = threading.Thread(target=host_care.care, args=(settings, cast(Any, None), stop), daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "no files left"), RuntimeError("can't start new thread")])
def test_one_that_could_not_begin_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    failures, working, stop = [error], threading.Event(), threading.Event()

    @contextmanager
    def turn(file: Path, *, timeout_s: float) -> Iterator[None]:
        if failures:
            raise failures.pop()
        yield

    def work(over: threading.Event) -> None:
        working.set()
        over.wait()

    monkeypatch.setattr(host_care, "turn", turn)
    monkeypatch.setattr(host_care, "_AWAY_S", 0.01)
    monkeypatch.setattr(host_care, "works", lambda *_: {"work": work})
    thread = cared(Settings(home=tmp_path), stop)
    assert working.wait(5)
    stop.set()
    thread.join(5)
    assert not thread.is_alive()
