"""The product's programs of one case: started, kept running as its supervisor would, killed, stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from app.settings import Settings
from app.stack.home import process_environment, run_folder
from tests.chaos import children
from tests.chaos.launchers import faults
from tests.chaos.launchers.faults import Rule

_RESTART_S = 0.3
_LAST = ("beat", "control", "launcher", "simulation")
"""The order of stopping: who gives out work first, what instances lean on last."""


@dataclass
class Program:
    """One process, or its successor."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    log: Path
    kept: bool = True
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    def start(self) -> None:
        self.process = children.spawn(self.command, log=self.log, env=self.env)
        self.starts += 1

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None


@dataclass
class Programs:
    """All programs of one installation. A thread starts again what has died and is to be kept."""

    settings: Settings
    faults_folder: Path
    _table: dict[str, Program] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closing: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        threading.Thread(target=self._keep, name="keeper", daemon=True).start()

    def start(
        self, name: str, plan: Sequence[Rule] = (), *, arguments: Sequence[str] = (), kept: bool = True
    ) -> Program:
        """Start `launcher`, `control`, `simulation` or `beat`; `control-2` is another control worker."""
        env = process_environment(self.settings)
        role = name.partition("-")[0]
        if role == "beat":
            schedule = run_folder(self.settings) / f"{name}-schedule"
            celery = (sys.executable, "-m", "celery", "-A", "app.celery_app", "beat")
            command: tuple[str, ...] = (*celery, "--pidfile=", f"--schedule={schedule}")
        elif plan:
            command = (sys.executable, "-m", "tests.chaos.launchers", role, *arguments)
            env |= faults.environment_of(plan, self.faults_folder)
        else:
            command = (sys.executable, "-m", f"app.workers.{role}", *arguments)
        program = Program(name, command, env, self.settings.home / "logs" / f"{name}.log", kept)
        with self._lock:
            program.start()
            self._table[name] = program
        return program

    def __getitem__(self, name: str) -> Program:
        return self._table[name]

    def names(self) -> list[str]:
        return list(self._table)

    def signal(self, name: str, number: signal.Signals) -> None:
        """To the process itself, not to its children."""
        self._table[name].process.send_signal(number)  # type: ignore[union-attr]

    def kill(self, name: str, *, kept: bool = True) -> None:
        """SIGKILL; started again when `kept`."""
        with self._lock:
            program = self._table[name]
            program.kept = kept
            assert program.process is not None
            program.process.kill()
            program.process.wait()

    def stop(self, name: str, *, patience_s: float = 25) -> bool:
        """SIGTERM and wait, for good. False when it had to be killed."""
        with self._lock:
            program = self._table.pop(name)
        return program.process is None or children.end(program.process, patience_s=patience_s)

    def restart(self, name: str) -> None:
        """As a deploy does: SIGTERM, wait, start the same again."""
        with self._lock:
            program = self._table[name]
            assert program.process is not None
            children.end(program.process, patience_s=40)
            program.start()

    def stop_all(self) -> list[str]:
        """Stop everything; names of those that had to be killed."""
        self._closing.set()
        order = sorted(self._table, key=lambda name: _LAST.index(name.partition("-")[0]))
        return [name for name in order if not self.stop(name)]

    def _keep(self) -> None:
        while not self._closing.wait(_RESTART_S):
            with self._lock:
                for program in self._table.values():
                    if program.kept and not program.runs:
                        program.start()


def wait_for(true: object, within_s: float, every_s: float = 0.1) -> bool:
    """Whether `true()` became so in time."""
    give_up = time.monotonic() + within_s
    while not true():  # type: ignore[operator]
        if time.monotonic() > give_up:
            return False
        time.sleep(every_s)
    return True
