"""From the helper's word on a command to the result that callers get."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from app.environments.session import protocol
from app.environments.session.lane import Lane, LaneLost
from app.environments.session.lanes import Lanes
from app.environments.session.protocol import CHUNK_BYTES, Kind, Outcome, ResultFlag
from app.environments.session.turns import BEGINNING_S, TURNS
from app.models.shell import LOGS_FULL, CommandResult, OutputLog, OutputLogs

AFTER_TIMEOUT_S = 20.0
"""The helper ends a command itself, and kills for at most 8 s; one that is silent for this much longer is gone."""
_KILLED_NOTE = b"\n[the command's supervisor was killed from inside the environment; its output is lost]\n"


def begin(lane: Lane, request: bytes, timeout_s: float, *, more: bool = False) -> None:
    """Ask for a command in its turn; returns when it has ended, or is well under way.

    more: it waits for input, which is sent next. Raises: LaneLost.
    """
    with TURNS:
        lane.deadline = time.monotonic() + timeout_s + AFTER_TIMEOUT_S
        lane.send(request)
        if not more:
            lane.wait(BEGINNING_S)


class LongStreams:
    """What comes of a command's streams before its result, because they are too long to be in it; for a `with` block.

    Made for every command: nothing is opened before it is needed.
    """

    __slots__ = ("_command", "_logs", "_open", "_taken", "limit_bytes")

    def __init__(self, logs: OutputLogs | None, command: str | Sequence[str]) -> None:
        self.limit_bytes = 0 if logs is None else logs.left_bytes
        self._logs = logs
        self._command = command
        self._open: dict[Kind, OutputLog] = {}
        self._taken: dict[Kind, int] = {}

    def take(self, kind: Kind, piece: memoryview) -> None:
        """Raises: LaneLost: more than was asked for."""
        self._taken[kind] = taken = self._taken.get(kind, 0) + len(piece)
        if self._logs is None or taken > self.limit_bytes:
            raise LaneLost(f"expected at most {self.limit_bytes} bytes of {kind.name}, found {taken}")
        if kind not in self._open:
            command = self._command if isinstance(self._command, str) else shlex.join(self._command)
            self._open[kind] = self._logs.open("stdout" if kind is Kind.OUT else "stderr", command)
        self._open[kind].write(piece)

    def told(self, kind: Kind, total_bytes: int) -> str:
        """Where what is left out of a stream of that length is to be found."""
        if kind in self._open:
            return self._open[kind].location(total_bytes)
        return LOGS_FULL if self._logs is not None and not self.limit_bytes else ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(log.name for log in self._open.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for log in self._open.values():
            log.close()


def receive_outcome(lane: Lane, limit_bytes: int, streams: LongStreams) -> Outcome:
    """Raises: LaneLost: also for a reply that is no result."""
    most = max(protocol.result_limit(limit_bytes), CHUNK_BYTES)
    kind, payload = lane.receive(most)
    while kind in (Kind.OUT, Kind.ERR):
        streams.take(kind, payload)
        if time.monotonic() > lane.deadline:
            raise LaneLost("it comes to no end")
        kind, payload = lane.receive(most)
    if kind is not Kind.RESULT:
        raise LaneLost(f"expected a result, found {kind.name}")
    try:
        outcome = protocol.outcome(payload, limit_bytes, streams.told)
    except ValueError as error:
        raise LaneLost(f"found {error}") from error
    return replace(outcome, logs=streams.names) if streams.names else outcome


def after_loss(lanes: Lanes, error: LaneLost) -> Outcome:
    """A command may kill whatever is beside it, its supervisor too: that is an answer while the helper lives.

    Raises: EnvironmentFailed: it does not, or the connection did not end: silence and nonsense are no answers.
    """
    if not error.ended or lanes.closed or not lanes.alive():
        raise lanes.lost(error) from error
    return Outcome(137, 9, ResultFlag(0), b"", _KILLED_NOTE, 0, 0.0, 0, 0.0)


def result_of(outcome: Outcome, duration_s: float) -> CommandResult:
    timed_out = ResultFlag.TIMED_OUT in outcome.flags
    return CommandResult(
        exit_code=None if timed_out else outcome.exit_code,
        stdout=outcome.stdout,
        stderr=outcome.stderr,
        timed_out=timed_out,
        truncated=outcome.dropped_bytes > 0,
        duration_s=duration_s,
        logs=outcome.logs,
    )
