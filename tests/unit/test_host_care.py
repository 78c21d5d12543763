"""Whoever cares for a host comes back, whatever it lacked."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from app.settings import Settings
from app.workers import host_care


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
