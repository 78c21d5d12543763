"""A shell whose folder, exports, variables and functions live from one command to the next."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from app.environments.session import protocol
from app.environments.session.lane import Lane, LaneLost
from app.environments.session.lanes import Lanes
from app.environments.session.outcomes import LongStreams, after_loss, begin, receive_outcome, result_of
from app.environments.session.protocol import Kind, frame
from app.models.shell import CommandResult, OutputLogs

_START_S = 15.0


class ShellSession:
    """One long-lived shell. One command at a time: a second caller waits."""

    def __init__(
        self, lanes: Lanes, request: bytes, limit_bytes: int, logs: Callable[[], OutputLogs | None] = lambda: None
    ) -> None:
        """`request` opens the shell; it is sent again when what carried it was killed."""
        self._logs = logs
        self._lanes = lanes
        self._request = request
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._closed = False
        self._lane: Lane | None = self._open()

    def _open(self) -> Lane:
        lane = self._lanes.take()
        lane.deadline = time.monotonic() + _START_S
        try:
            lane.send(self._request)
            kind, payload = lane.receive(2048)
            problem = None if kind is Kind.OK else reason(kind, payload)
        except LaneLost as error:
            self._lanes.drop(lane)
            raise self._lanes.lost(error) from error
        if problem is not None:
            self._lanes.drop(lane)
            raise self._lanes.failed(f"gives no shell: {problem}")
        return lane

    def run(self, command: str, *, timeout_s: float) -> CommandResult:
        """Run `command` in the shell; its input is empty.

        When the command ends the shell (`exit`, `exec`, `set -e`, a signal), its status is the exit code, and the next
        command finds a new shell with the folder and the exports of the old one. The same after a timeout, which
        kills all that this command started, but not what earlier ones left running.

        Raises: EnvironmentFailed: the environment is gone, or the session was closed.
        """
        begun = time.monotonic()
        timeout_ms = protocol.milliseconds(timeout_s)
        with self._lock, LongStreams(self._logs(), command) as streams:
            request = protocol.shell_run(
                protocol.encoded(command), timeout_ms=timeout_ms, log_bytes=streams.limit_bytes
            )
            if self._closed:
                raise self._lanes.failed("is asked to run a command in a shell that was closed")
            self._lane = lane = self._lane or self._open()
            try:
                begin(lane, request, timeout_s)
                outcome = receive_outcome(lane, self._limit_bytes, streams)
            except LaneLost as error:
                self._drop(lane)
                if self._closed:
                    raise self._lanes.failed("had a command under way in a shell that was closed") from error
                outcome = after_loss(self._lanes, error)
        return result_of(outcome, time.monotonic() - begun)

    def _drop(self, lane: Lane) -> None:
        self._lane = None
        self._lanes.drop(lane)

    def close(self) -> None:
        """End the shell; what it left running in the background lives on. Safe to call twice.

        A command under way is cut off: it ends with EnvironmentFailed, killed with all that the shell started.
        """
        self._closed = True
        if not self._lock.acquire(blocking=False):
            lane = self._lane
            if lane is not None:
                lane.abort()
            return
        try:
            if self._lane is not None:
                self._leave(self._lane)
        finally:
            self._lock.release()

    def _leave(self, lane: Lane) -> None:
        self._lane = None
        lane.deadline = time.monotonic() + _START_S
        try:
            lane.send(frame(Kind.SHELL_CLOSE))
            ended = lane.receive(64)[0] is Kind.OK
        except LaneLost:
            ended = False
        if ended:
            self._lanes.give(lane)
        else:
            self._lanes.drop(lane)


def reason(kind: Kind, payload: memoryview) -> str:
    if kind is not Kind.FAILED:
        raise LaneLost(f"expected a shell, found {kind.name}")
    try:
        return protocol.failure(payload)[2].strip()
    except ValueError as error:
        raise LaneLost(f"found {error}") from error
