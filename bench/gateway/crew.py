"""Those who can be measured, and how load is put on them: one at a time, in turns, by a process of its own."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.request import Request, urlopen

from bench.gateway import processes
from bench.gateway.contenders import BARE, REPOSITORY, Contender
from bench.gateway.load import BEGUN, Job, Told
from bench.gateway.wire import Wish

Say = Callable[[str], None]
_SPARE_S = 60.0


class Fault(Exception):
    """A contender did not do what was asked of it."""


@dataclass
class Crew:
    """Everybody present. `faults`: who fell out of the part that is being measured, and why."""

    contenders: dict[str, Contender]
    absent: dict[str, str]
    folder: Path
    say: Say
    versions: dict[str, str] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)

    def turns(self, rounds: int, names: Sequence[str]) -> Iterator[tuple[int, Contender]]:
        """Everybody once a round, each round beginning with another; those that fell out are left out."""
        present = [name for name in names if name in self.contenders]
        for number in range(rounds):
            for offset in range(len(present)):
                name = present[(number + offset) % len(present)]
                if name not in self.faults:
                    self.say(f"round {number + 1} of {rounds}: {name}")
                    yield number, self.contenders[name]

    def warm(self) -> None:
        """Everybody has answered both ways before anything is measured: LiteLLM loads much at its first calls."""
        for contender in self.contenders.values():
            self.say(f"warming up {contender.name}")
            for wish in (Wish(), Wish(events=20)):
                self.put(contender, wish, width=8, calls=200)

    def put(self, contender: Contender, wish: Wish, **job: Any) -> Told | None:
        """Load of that kind; None: not all was answered as it should be, and the contender is out of this part."""
        try:
            with self.putting(contender, wish, **job) as running:
                return running.end()
        except Fault as fault:
            self.out(contender, fault)
            return None

    def out(self, contender: Contender, fault: Exception) -> None:
        """It is out for the rest of the part."""
        self.say(f"{contender.name} falls out: {fault}")
        self.faults[contender.name] = str(fault)

    @contextmanager
    def putting(self, contender: Contender, wish: Wish, **job: Any) -> Iterator[Running]:
        """The same while something else is done. `tokens`: how many attempts call; without it: one for each caller."""
        tokens = contender.tokens(job.pop("tokens", job["width"]))
        whole = Job(contender.port, contender.path, tokens, wish=wish, **job)
        result, log = self.folder / "load.json", self.folder / "load.log"
        result.unlink(missing_ok=True)
        command = [sys.executable, "-m", "bench.gateway.load", str(result)]
        with processes.running(command, log=log, cwd=REPOSITORY) as process:
            assert process.stdin is not None
            process.stdin.write(json.dumps(asdict(whole)))
            process.stdin.close()
            yield Running(process, whole, result, log)

    def release(self) -> None:
        """Let the engine end all streams that it holds."""
        url = f"http://127.0.0.1:{self.contenders[BARE].port}/release"
        urlopen(Request(url, method="POST"), timeout=30).close()

    def begin(self) -> None:
        """A new part: whoever fell out of the last one may try again."""
        self.faults.clear()


@dataclass(frozen=True, slots=True)
class Running:
    """A load at work."""

    process: subprocess.Popen[str]
    job: Job
    result: Path
    log: Path

    def until_begun(self, timeout_s: float) -> None:
        """Until every stream has had its first event. Raises: Fault."""
        assert self.process.stdout is not None
        said = _line(self.process, self.process.stdout, timeout_s)
        if said != BEGUN:
            raise Fault(f"not all of {self.job.width} streams began within {timeout_s:g} s: {said[:600]}")

    def told(self) -> Told:
        """What it measured, faults and all. Raises: Fault: nothing at all."""
        try:
            code = self.process.wait(self.job.give_up_s + _SPARE_S)
            return Told(**json.loads(self.result.read_text()))
        except subprocess.TimeoutExpired as error:
            raise Fault(f"the load did not end within {self.job.give_up_s + _SPARE_S:g} s") from error
        except (OSError, TypeError, ValueError) as error:
            words = self.log.read_text(errors="replace").strip()[-600:]
            raise Fault(f"the load ended with exit code {code} and no result: {words}") from error

    def end(self) -> Told:
        """What it measured. Raises: Fault: calls failed."""
        told = self.told()
        if told.faults:
            raise Fault(f"{sum(told.faults.values())} calls failed, {len(told.took_s)} did not: {told.faults}"[:600])
        if not told.took_s:
            raise Fault(f"no call was begun and ended within {self.job.seconds:g} s")
        return told


def _line(process: subprocess.Popen[str], output: IO[str], timeout_s: float) -> str:
    """The next line; nothing when none comes in time, or ever."""
    give_up = time.monotonic() + timeout_s
    while time.monotonic() < give_up:
        if select.select([output], [], [], 1.0)[0]:
            return output.readline().strip()
        if process.poll() is not None:
            break
    return ""
