"""From the helper's word on a command to the result that callers get."""

from __future__ import annotations

import time

from app.environments.session import protocol
from app.environments.session.lane import Lane, LaneLost
from app.environments.session.lanes import Lanes
from app.environments.session.protocol import Kind, Outcome, ResultFlag
from app.environments.session.turns import BEGINNING_S, TURNS
from app.models.shell import CommandResult

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


def receive_outcome(lane: Lane, limit_bytes: int) -> Outcome:
    """Raises: LaneLost: also for a reply that is no result."""
    kind, payload = lane.receive(protocol.result_limit(limit_bytes))
    if kind is not Kind.RESULT:
        raise LaneLost(f"expected a result, found {kind.name}")
    try:
        return protocol.outcome(payload, limit_bytes)
    except ValueError as error:
        raise LaneLost(f"found {error}") from error


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
    )
