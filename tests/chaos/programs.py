"""The product's programs of one case: started, kept running as its supervisor would, killed, stopped."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from app.settings import Settings
from app.stack.home import run_folder
from app.stack.private import PrivateStack
from app.stack.programs import Program, StartStage
from tests.chaos.launchers import faults
from tests.chaos.launchers.faults import Rule

_ROOT = Path(__file__).parents[2]
"""Where `-m` finds the launchers."""
_RESTART_S = 0.3
_LAST = (
    "loop",
    "consumer",
    "trainer",
    "handout",
    "beat",
    "control",
    "pool",
    "launcher",
    "simulation",
    "gateway",
    "engine",
)
"""The order of stopping: who gives out work first, what instances lean on last."""


@dataclass
class Programs:
    """All programs of one installation. A thread starts again what has died and is to be kept."""

    settings: Settings
    faults_folder: Path
    _stack: PrivateStack = field(init=False)
    _kept: dict[str, Program] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closing: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._stack = PrivateStack(self.settings)
        threading.Thread(target=self._keep, name="keeper", daemon=True).start()

    def start(self, name: str, plan: Sequence[Rule] = (), *, arguments: Sequence[str] = ()) -> None:
        """Start `launcher`, `control`, `simulation` or `beat`; `control-2` is another control worker."""
        role = name.partition("-")[0]
        if role == "beat":
            schedule = run_folder(self.settings) / f"{name}-schedule"
            celery = (sys.executable, "-m", "celery", "-A", "app.celery_app", "beat")
            command: tuple[str, ...] = (*celery, "--pidfile=", f"--schedule={schedule}")
        elif plan:
            variables = {**faults.environment_of(plan, self.faults_folder), "PYTHONPATH": str(_ROOT)}
            given = (f"{key}={value}" for key, value in variables.items())
            command = ("/usr/bin/env", *given, sys.executable, "-m", "tests.chaos.launchers", role, *arguments)
        else:
            command = (sys.executable, "-m", faults.MODULES[role], *arguments)
        self.run(name, command)

    def run(self, name: str, command: tuple[str, ...]) -> None:
        """Start a program by its command, and keep it."""
        with self._lock:
            self._kept[name] = Program(name, StartStage.WORK, command)
            self._stack.spawn(self._kept[name])

    @property
    def pids(self) -> dict[str, int]:
        """Of those that run now."""
        return self._stack.pids

    def signal(self, name: str, number: signal.Signals) -> None:
        """To the process itself, not to its children."""
        self._stack.kill(name, number)

    def kill(self, name: str, *, kept: bool = True) -> None:
        """SIGKILL; started again when `kept`."""
        with self._lock:
            if not kept:
                del self._kept[name]
            self._stack.kill(name)
            wait_for(lambda: name not in self.pids, 10)

    def restart(self, name: str) -> None:
        """As a deploy does: SIGTERM, wait, start the same again."""
        with self._lock:
            self._end(name, patience_s=40)
            self._stack.spawn(self._kept[name])

    def stop_all(self) -> list[str]:
        """Stop everything; names of those that had to be killed."""
        self._closing.set()
        with self._lock:
            order = sorted(self.pids, key=lambda name: _LAST.index(name.partition("-")[0]))
            stubborn = [name for name in order if not self._end(name, patience_s=25)]
            self._kept.clear()
        return stubborn

    def close(self) -> None:
        """Stop everything, for good."""
        self.stop_all()
        self._stack.close()

    def _end(self, name: str, *, patience_s: float) -> bool:
        """SIGTERM, and SIGKILL to one that stays. True when it went by itself; nothing below it is touched."""
        for number in (signal.SIGCONT, signal.SIGTERM):
            self._stack.kill(name, number)
        if wait_for(lambda: name not in self.pids, patience_s):
            return True
        self._stack.kill(name)
        wait_for(lambda: name not in self.pids, 10)
        return False

    def _keep(self) -> None:
        while not self._closing.wait(_RESTART_S):
            with self._lock:
                for name in self._kept.keys() - self.pids.keys():
                    self._stack.spawn(self._kept[name])


def wait_for(true: object, within_s: float, every_s: float = 0.1) -> bool:
    """Whether `true()` became so in time."""
    give_up = time.monotonic() + within_s
    while not true():  # type: ignore[operator]
        if time.monotonic() > give_up:
            return False
        time.sleep(every_s)
    return True
