"""Runs a framework's process inside the environment and copies its output into files on the worker."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from app.agents.framework import FrameworkCommand, Stop
from app.agents.running.agent_home import AgentHome
from app.agents.running.clock import Clock, await_end
from app.agents.running.outputs import Output, Outputs
from app.errors import DiskFull, StationError
from app.models.shell import CancelToken, InteractiveProgram, Shell

log = structlog.get_logger(__name__)

_GRACE_S = 3.0  # between SIGTERM and SIGKILL
_LOOK_S = 0.25  # a stream may be closed only by whoever reads it, who therefore looks up this often
_SILENCE_S = 1.0  # after so long without output it is asked for its exit code: a child may hold the output open
_ASK_S = 0.1
_LAST_WORDS_S = 1.0  # for the errors, when the program has ended
_PROBE_S = 30.0
_KILLED = -9


def run_inside(
    command: FrameworkCommand,
    agent_home: AgentHome,
    shell: Shell,
    *,
    outputs: Outputs,
    clock: Clock,
    cancel: CancelToken,
) -> tuple[Stop, int]:
    """Run `command` inside until it ends, its time is up, or `cancel` says stop: who ended it, and its exit code.

    The code is negative when a signal killed it. After a timeout nothing that it started is left; what it left in the
    background when it ended by itself lives on.

    Raises: EnvironmentFailed, or what else the shell says of its end; DiskFull: of its outputs on this host.
    """
    bell = threading.Event()
    errors = _OutputReader(shell.stream(agent_home.errors), outputs, outputs.stderr, bell)
    try:
        program = shell.stream(agent_home.argv(command), env=command.env)
        main = _OutputReader(program, outputs, outputs.stdout, bell)
        try:
            by = await_end(bell, lambda: main.over.is_set() or errors.full is not None, clock, cancel)
            if by is not Stop.ITSELF:
                _ask_to_end(main, agent_home, shell, cancel)
        finally:
            main.end()
    finally:
        errors.over.wait(_LAST_WORDS_S)
        errors.end()
    if by is Stop.CANCEL:  # what is wrong with the environment now is the cancel's doing
        return by, _KILLED
    for reader in (main, errors):
        if reader.full is not None:
            raise DiskFull(f"the outputs of the agent cannot be kept: {reader.full}.") from reader.full
    if main.fault is not None:
        # Whoever kills all processes inside also cuts the stream; the environment itself knows whether it lives.
        shell.run("true", timeout_s=_PROBE_S)
        log.warning("agent.stream_lost", reason=str(main.fault))
    return by, main.returncode


def _ask_to_end(main: _OutputReader, agent_home: AgentHome, shell: Shell, cancel: CancelToken) -> None:
    """SIGTERM, and some time to write the last file; none when the environment itself is being ended."""
    until = time.monotonic() + _GRACE_S
    with suppress(StationError):
        agent_home.announce_stop(shell)
        main.stream.signal(signal.SIGTERM)
        while time.monotonic() < until and not cancel.is_set():
            if main.over.wait(_ASK_S) or agent_home.has_stopped(shell):
                return


@dataclass
class _OutputReader:
    """Reads one stream to its end in a thread of its own."""

    stream: InteractiveProgram
    outputs: Outputs
    output: Output
    bell: threading.Event
    over: threading.Event = field(default_factory=threading.Event)
    fault: StationError | None = None
    full: OSError | None = None
    returncode: int = _KILLED

    def __post_init__(self) -> None:
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._work, name="agent-output", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._enough.set()
        self._thread.join()

    def _work(self) -> None:
        try:
            code = self._read()
            if code is not None:
                self.returncode = 128 - code if 128 < code < 128 + signal.NSIG else code
        except StationError as error:
            self.fault = error
        finally:
            self.over.set()
            self.bell.set()
            with suppress(StationError):
                self.stream.close()

    def _read(self) -> int | None:
        heard, code = time.monotonic(), None
        while not self._enough.is_set():
            piece = self.stream.read(_LOOK_S)
            if piece:
                heard = time.monotonic()
                self._keep(piece)
            elif piece is not None or code is not None:
                return self._exit_code() if code is None else code
            elif time.monotonic() - heard >= _SILENCE_S:
                heard, code = time.monotonic(), self.stream.wait(0.0)
        return None

    def _exit_code(self) -> int | None:
        while not self._enough.is_set():
            if (code := self.stream.wait(_LOOK_S)) is not None:
                return code
        return None

    def _keep(self, data: bytes) -> None:
        if self.full is not None:
            return
        try:
            self.outputs.write(self.output, data)
        except OSError as error:
            self.full = error
            self.bell.set()
