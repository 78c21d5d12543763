"""The contenders' processes: started once, asked in turns, ended with everything that they made."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.environments.contenders import CONTENDERS, Fixtures, Ready
from bench.peers import environments as adapters

Say = Callable[[str], None]
LOOP = Path(adapters.__file__).parent / "loop.py"
_WARM_S = 300.0
_LEAVE_S = 120.0
_SETTLE_S, _IDLE_PERCENT = 5.0, 10.0


class Fault(Exception):
    """A contender could not do what was asked."""


class Hand:
    """One contender's process."""

    def __init__(self, name: str, ready: Ready, folder: Path) -> None:
        self.name = name
        place = folder / f"peer-{ready.adapter}-{len(list(folder.glob('peer-*')))}"
        place.mkdir()
        self.book, self.log = place / "book", place / "log"
        options = {**ready.options, "book": str(self.book)}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603
                [ready.python, str(LOOP), ready.adapter, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=place,
                env=_variables(ready, place),
                start_new_session=True,
            )

    def ask(self, what: str, *, timeout_s: float, **arguments: Any) -> Any:
        """Raises: Fault: it said so, or said nothing in time (then its process is ended)."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": what, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
            answer = json.loads(self._line(timeout_s))
        except (OSError, ValueError) as error:
            raise Fault(f"its process has ended: {self._last_words()}") from error
        if "error" in answer:
            raise Fault(answer["error"])
        return answer["answer"]

    def _line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        descriptor, line, until = self._process.stdout.fileno(), b"", time.monotonic() + timeout_s
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
            if not readable:
                self.kill()
                raise Fault(f"no answer within {timeout_s:.0f} s")
            if not (more := os.read(descriptor, 1 << 20)):
                raise OSError("end of output")
            line += more
        return line

    def _last_words(self) -> str:
        return self.log.read_text(errors="replace").strip()[-600:]

    def leave(self) -> None:
        """It removes what it made, and ends."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _variables(ready: Ready, place: Path) -> dict[str, str]:
    """Our settings stay here; a peer's own configuration does not come from the user's home."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MEGAFLOW_", "PYTHON"))}
    if ready.python != sys.executable:
        clean["HOME"] = str(place)
    return {**clean, "PYTHONDONTWRITEBYTECODE": "1", **ready.variables}


@dataclass
class Crew:
    """Those who can be measured, and why the others cannot."""

    hands: dict[str, Hand]
    versions: dict[str, str]
    absent: dict[str, str]
    """Why somebody is missing altogether."""
    say: Say
    faults: dict[str, str] = field(default_factory=dict)
    """Who fell out of the part that is being measured, and why."""

    def ask(self, name: str, what: str, *, timeout_s: float = 600.0, **arguments: Any) -> Any:
        """The answer, or None: then it is out for the rest of the part."""
        if name in self.faults or name not in self.hands:
            return None
        try:
            return self.hands[name].ask(what, timeout_s=timeout_s, **arguments)
        except Fault as fault:
            self.say(f"{name} falls out: {fault}")
            self.faults[name] = str(fault)
            return None

    def turns(self, rounds: int, names: Sequence[str]) -> Iterator[tuple[int, str]]:
        """Everybody once a round, each round beginning with another; those that fell out are left out."""
        present = [name for name in names if name in self.hands]
        for number in range(rounds):
            for offset in range(len(present)):
                name = present[(number + offset) % len(present)]
                if name not in self.faults:
                    _settle()
                    self.say(f"round {number + 1} of {rounds}: {name}")
                    yield number, name

    def begin(self) -> None:
        """A new part: whoever fell out of the last one may try again."""
        self.faults.clear()


def _settle() -> None:
    """Wait until the machine is idle: what one's removals leave to the kernel is not the next one's cost."""
    until = time.monotonic() + _SETTLE_S
    while psutil.cpu_percent(interval=0.25) > _IDLE_PERCENT and time.monotonic() < until:
        pass


@contextmanager
def gathered(fixtures: Fixtures, names: Sequence[str], say: Say) -> Iterator[Crew]:
    """All that can be had here, warm: each has made, used and ended one environment."""
    crew = Crew({}, {}, {}, say)
    with ExitStack() as stack:
        for name in names:
            say(f"preparing {name}")
            try:
                hand = Hand(name, CONTENDERS[name](fixtures), fixtures.folder)
                stack.callback(hand.leave)
                told = hand.ask("hello", timeout_s=_WARM_S)
            except (RuntimeError, Fault) as error:
                crew.absent[name] = str(error)
                say(f"{name} cannot be measured here: {error}")
                continue
            crew.hands[name] = hand
            crew.versions |= {f"{name}: {key}": value for key, value in told.items()}
        yield crew


def books(folder: Path) -> list[str]:
    """Containers that any contender ever made in this run."""
    return [line for book in folder.glob("peer-*/book") for line in book.read_text().split()]
