"""Runs a framework's process on the worker under a supervisor, and ends it with all its children."""

from __future__ import annotations

import os
import select
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO

from app.agents.framework import Stop
from app.agents.installation.once import start
from app.agents.running.clock import Clock, await_end
from app.agents.running.outputs import Output, Outputs
from app.errors import AgentFailed, DiskFull
from app.models.shell import CancelToken

_NICE = 5  # lower priority than the process that renews the lease
_LAST_S = 40.0  # longer than the supervisor needs to give up
_LAST_BYTES = 1 << 20  # a pipe holds at most this; more comes from a process that outlived the supervisor


def run_outside(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str,
    stdin: bytes,
    outputs: Outputs,
    clock: Clock,
    cancel: CancelToken,
) -> tuple[Stop, int]:
    """Runs `argv` until it ends, its time is up, or `cancel` is set. Returns what ended it, and its exit code.

    The code is negative when a signal killed it. No process that it started is left when this returns.

    Raises: AgentFailed: it cannot be started; DiskFull: for its outputs.
    """
    with tempfile.TemporaryFile() as words:
        words.write(stdin)
        words.seek(0)
        try:
            process = _AgentProcess(argv, env, cwd, words, outputs)
        except OSError as error:
            raise AgentFailed(f"expected to start {argv[0]} in {cwd}; found {error}") from error
    try:
        by = await_end(process.bell, process.ended, clock, cancel)
    finally:
        process.end()
    return by, process.code()


class _AgentProcess:
    """The supervisor process, and threads that read its outputs and status."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, stdin: IO[bytes], outputs: Outputs
    ) -> None:
        self.bell = threading.Event()
        self._over = threading.Event()
        self._told = b""
        self._full: OSError | None = None
        self._outputs = outputs
        self._enough = os.eventfd(0)
        try:
            self._supervisor, self._control, status = start(argv, env=env, cwd=cwd, stdin=stdin)
        except BaseException:
            os.close(self._enough)
            raise
        with suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, self._supervisor.pid, _NICE)
        assert self._supervisor.stdout is not None
        assert self._supervisor.stderr is not None
        self._carriers = [
            self._in_background(self._carry, self._supervisor.stdout, outputs.stdout),
            self._in_background(self._carry, self._supervisor.stderr, outputs.stderr),
            self._in_background(self._listen, status),
        ]

    def ended(self) -> bool:
        return self._over.is_set() or self._full is not None

    def end(self) -> None:
        with suppress(OSError):  # it has just ended
            os.write(self._control, b"s")
        os.close(self._control)
        if not self._over.wait(_LAST_S):
            self._supervisor.kill()
        self._supervisor.wait()
        os.eventfd_write(self._enough, 1)  # an orphan of a killed supervisor may hold the outputs open
        for carrier in self._carriers:
            carrier.join(_LAST_S)
        os.close(self._enough)
        for pipe in (self._supervisor.stdout, self._supervisor.stderr):
            if pipe is not None:
                pipe.close()

    def code(self) -> int:
        """Raises: AgentFailed: it never ran; DiskFull."""
        if self._full is not None:
            raise DiskFull(f"the outputs of the agent cannot be kept: {self._full}.") from self._full
        word, _, detail = self._told.decode("utf-8", "replace").strip().partition(" ")
        if word == "failed":
            raise AgentFailed(f"expected to start the framework; found {detail}")
        try:
            return int(detail)
        except ValueError:  # the supervisor was killed or gave up
            return -9

    def _in_background(self, work: Callable[..., None], *values: object) -> threading.Thread:
        thread = threading.Thread(target=work, args=values, name="agent-output", daemon=True)
        thread.start()
        return thread

    def _carry(self, pipe: IO[bytes], output: Output) -> None:
        """Copies output until all writers have closed the pipe, or `end` is called. Reads on when the disk is full:
        otherwise the program would hang.
        """
        look, number, left = select.poll(), pipe.fileno(), _LAST_BYTES
        look.register(number, select.POLLIN)
        look.register(self._enough, select.POLLIN)
        while left > 0:
            ready = [which for which, _ in look.poll()]
            if number not in ready or not (data := os.read(number, 1 << 16)):
                return
            if self._enough in ready:
                left -= len(data)
            try:
                if self._full is None:
                    self._outputs.write(output, data)
            except OSError as error:
                self._full = error
                self.bell.set()

    def _listen(self, status: int) -> None:
        with open(status, "rb") as reader:
            self._told = reader.read()
        self._over.set()
        self.bell.set()
