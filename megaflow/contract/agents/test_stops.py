"""Contract of stops: time is up, a cancel, a killed framework, a lost environment.

After every stop, no process of the framework is left.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.agents.framework import Framework, Placement
from app.environments.contract import Environment
from app.errors import EnvironmentFailed
from app.models.endings import EndReason
from megaflow.contract.agents.fixtures import LIMITS, Play, wait_until
from megaflow.contract.agents.trial import STARTED, WORKDIR, Trial

_SCENE = "works"
"""A scene with a command that ends, then one without end."""
_LIMITS = LIMITS.model_copy(update={"command_timeout_s": 600})


class Token:
    """Cancel token that a test sets."""

    def __init__(self) -> None:
        self._set = threading.Event()
        self._callbacks: list[Callable[[], None]] = []

    def is_set(self) -> bool:
        return self._set.is_set()

    def on_cancel(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._callbacks.append(callback)
        if self.is_set():
            callback()
        return lambda: self._callbacks.remove(callback)

    def cancel(self) -> None:
        self._set.set()
        for callback in list(self._callbacks):
            callback()


@pytest.fixture
def own(framework: Framework, tmp_path: Path, environment: Environment) -> Callable[[], list[int]]:
    """Returns a function that lists the framework's processes: programs in its folder that have our marks."""
    folder = str(framework.install().folder)
    marks = (str(tmp_path).encode(), environment.id.encode())

    def pids() -> list[int]:
        return [pid for pid in _processes(marks) if any(folder in word for word in _words(pid)[:2])]

    return pids


@pytest.fixture
def nothing_left(tmp_path: Path, environment: Environment) -> Iterator[None]:
    """Checks afterwards that no process of the framework is left, and none of the environment once it is destroyed."""
    yield
    outside, inside = str(tmp_path).encode(), environment.id.encode()
    wait_until(lambda: not list(_processes((outside,))), 30)
    environment.destroy()
    wait_until(lambda: not list(_processes((outside, inside))), 30)


def test_its_time_is_bounded(play: Play, nothing_left: None) -> None:
    trial = play(_SCENE, limits=_LIMITS.model_copy(update={"agent_timeout_s": 15}))
    assert trial.report.end_reason is EndReason.AGENT_TIMEOUT, trial.report
    assert trial.report.log is not None


def test_a_cancel_ends_it(play: Play, environment: Environment, nothing_left: None) -> None:
    token = Token()
    with ThreadPoolExecutor(1) as thread:
        playing = thread.submit(play, _SCENE, limits=_LIMITS, cancel=token)
        begun(environment, playing.done)
        token.cancel()
        trial: Trial = playing.result(60)
    assert trial.report.end_reason is EndReason.CANCELLED, trial.report


def test_a_cancel_before_it_starts_is_heard(play: Play, nothing_left: None) -> None:
    token = Token()
    token.cancel()
    assert play(_SCENE, limits=_LIMITS, cancel=token).report.end_reason is EndReason.CANCELLED


@pytest.mark.parametrize(
    ("number", "reasons"),
    [
        # Killed, but not by MegaFlow: the host ran out of memory or shuts down. The agent's commands cannot cause it,
        # except inside the environment.
        (signal.SIGKILL, (EndReason.INFRASTRUCTURE,)),
        # A crash is the framework's fault.
        (signal.SIGSEGV, (EndReason.AGENT_ERROR, EndReason.INFRASTRUCTURE)),
    ],
    ids=["killed", "crashed"],
)
def test_a_framework_that_dies_is_told_from_one_that_ends(
    play: Play,
    environment: Environment,
    own: Callable[[], list[int]],
    nothing_left: None,
    framework: Framework,
    number: signal.Signals,
    reasons: tuple[EndReason, ...],
) -> None:
    with ThreadPoolExecutor(1) as thread:
        playing = thread.submit(play, _SCENE, limits=_LIMITS)
        begun(environment, playing.done)
        processes = own()
        assert processes, "expected the framework to run a program of its folder"
        for pid in processes:
            os.kill(pid, number)
        trial: Trial = playing.result(120)
    if framework.placement is Placement.INSIDE:
        # The agent's own commands may be the cause: the attempt must not be repeated.
        reasons = (EndReason.AGENT_ERROR,)
    assert trial.report.end_reason in reasons, trial.report
    assert trial.report.detail
    assert trial.report.log is not None


def test_an_environment_that_goes_away_is_raised_as_such(
    play: Play, environment: Environment, nothing_left: None
) -> None:
    with ThreadPoolExecutor(1) as thread:
        playing = thread.submit(play, _SCENE, limits=_LIMITS)
        begun(environment, playing.done)
        environment.destroy()
        with pytest.raises(EnvironmentFailed):
            playing.result(120)


def begun(environment: Environment, ended: Callable[[], bool]) -> None:
    """Waits until the agent's first command has run."""

    def there() -> bool:
        try:
            return bool(environment.get(f"{WORKDIR}/{STARTED}"))
        except FileNotFoundError:
            return ended()

    wait_until(there)
    assert not ended(), "expected it to work still"


def _processes(marks: tuple[bytes, ...]) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and any(mark in (entry / "environ").read_bytes() for mark in marks):
                yield int(entry.name)
        except OSError:
            continue  # it has ended, or belongs to another user


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return []
