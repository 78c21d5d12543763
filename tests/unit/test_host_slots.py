"""Slots of a host: how many hold one, who waits where, and what a fork knows of it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.host import slots
from app.host.slots import HostSemaphore, HostSlots, turn


def test_only_so_many_hold_one_and_everybody_comes_through(tmp_path: Path) -> None:
    inside, most, lock = 0, 0, threading.Lock()

    def one(_: int) -> None:
        nonlocal inside, most
        with HostSlots(tmp_path / "slots", "starts", 3).hold(timeout_s=60):
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
    file = slots._try(tmp_path / "limit-of-a-host.0")  # as another process would, past this one's queue
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
    del again
    gc.collect()
    assert not [place for place, _ in slots._queues if place.is_relative_to(tmp_path)], "nobody waits there now"


ELSEWHERE = """
import sys, time
from pathlib import Path
from app.host.slots import turn
for _ in range(int(sys.argv[2])):
    with turn(Path(sys.argv[1]), timeout_s=120):
        print("turn", flush=True)
        time.sleep(0.005)
    time.sleep(0.03)
"""


def test_another_process_has_its_turns_too(tmp_path: Path) -> None:
    over, mine = threading.Event(), Counter[str]()

    def work() -> None:
        while not over.is_set():
            with turn(tmp_path / "turn", timeout_s=120):
                mine["turns"] += 1
                time.sleep(0.005)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    command = [sys.executable, "-c", ELSEWHERE, str(tmp_path / "turn"), "9"]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            before = mine["turns"]
            assert [other.stdout.readline() for _ in range(8)] == [b"turn\n"] * 8
            ours = mine["turns"] - before
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
    assert 0 < ours < 8 * 20  # three for each of theirs; a hundred where nobody gives way


def test_a_fork_does_not_wait_for_its_parents_threads(tmp_path: Path) -> None:
    with turn(tmp_path / "turn", timeout_s=60):
        child = os.fork()
        if child == 0:
            os._exit(0 if slots._queue_of(tmp_path / "turn", 1).acquire(blocking=False) else 1)
        assert os.waitpid(child, 0)[1] == 0
