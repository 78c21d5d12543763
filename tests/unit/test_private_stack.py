"""A stack of one's own: what was started is ended, whenever we are told to stop."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.settings import Settings
from app.stack.private import PrivateStack
from app.stack.programs import Program, StartStage


class ToldToStop(BaseException):
    """As a handler of SIGTERM raises it, in the middle of whatever was done."""


class Interrupting(ThreadPoolExecutor):
    """Does what it is given, and interrupts whoever waits for the first of it."""

    def __init__(self) -> None:
        super().__init__(1)
        self._first = True

    def submit(self, *given: Any, **more: Any) -> Future[Any]:
        made = super().submit(*given, **more)
        if self._first:
            self._first = False
            raise ToldToStop
        return made


def test_what_was_just_being_started_is_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(home=tmp_path / "h")
    (tmp_path / "h" / "logs").mkdir(parents=True)
    stack = PrivateStack(settings)
    monkeypatch.setattr(stack, "_starter", Interrupting())
    mark = f"9{tmp_path.stat().st_ino % 10**6}.5"
    with pytest.raises(ToldToStop):
        stack.spawn(Program("sleeper", StartStage.WORK, ("/bin/sleep", mark)))
    stack.close()
    assert stack.pids == {}
    assert not [one for one in psutil.process_iter(["cmdline"]) if mark in (one.info["cmdline"] or [])]
