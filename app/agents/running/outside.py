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

_NICE = 5  # behind whoever renews its lease
_LAST_S = 40.0  # the supervisor gives up before
_LAST_BYTES = 1 << 20  # a pipe holds no more: the rest is of a process that outlived the supervisor


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
    """Run `argv` until it ends, its time is up, or `cancel` says stop: who ended it, and its exit code.

    The code is negative when a signal killed it. Nothing that it started is left when this returns.

    Raises: AgentFailed: it cannot be started; DiskFull: of its outputs.
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
    """The supervisor, and threads that carry what comes from it."""

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
        word, _, told = self._told.decode("utf-8", "replace").strip().partition(" ")
        if word == "failed":
            raise AgentFailed(f"expected to start the framework; found {told}")
        try:
            return int(told)
        except ValueError:  # the supervisor was killed, or had to give up
            return -9

    def _in_background(self, work: Callable[..., None], *values: object) -> threading.Thread:
        thread = threading.Thread(target=work, args=values, name="agent-output", daemon=True)
        thread.start()
        return thread

    def _carry(self, pipe: IO[bytes], output: Output) -> None:
        """Until no process can write any more, or none should. What cannot be kept is read on all the same: else the
        program would hang.
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
