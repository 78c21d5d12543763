"""Turns a framework's ending into an end reason, with the part of its message that is safe to keep."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping

import structlog

from app.agents.framework import AgentEnding, Ended, Framework, Placement, Stop
from app.agents.stream_json import tail
from app.errors import MegaFlowError
from app.models.endings import EndReason

log = structlog.get_logger(__name__)

_CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGBUS, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS}
)
"""Signals that a program brings upon itself; every other is sent by another process."""
_DETAIL_CHARS = 2000
_MOST_COUNTS = 64
_LONGEST_NAME = 64
_LARGEST_COUNT = 1e15
_MOST_STEPS = 1 << 31


def foreign(returncode: int) -> bool:
    """Whether a signal ended it that it did not bring upon itself."""
    return returncode < 0 and -returncode in signal.valid_signals() and -returncode not in _CRASHES


def end_text(framework: Framework, ended: Ended, *, out_of_memory: bool = False) -> AgentEnding:
    """What the ending means. INSIDE the environment is known to live.

    There, what the agent's commands do to the framework's processes is the agent's own doing: were it called a fault of
    MegaFlow's, the model could have any attempt done again. A kill by the kernel for the environment's
    memory has been told by the environment.
    """
    if ended.by is Stop.CANCEL:
        return AgentEnding(EndReason.CANCELLED, "stopped on request")
    if ended.by is Stop.TIMEOUT:
        return AgentEnding(EndReason.AGENT_TIMEOUT, "still working when its time was up")
    inside = framework.placement is Placement.INSIDE
    if foreign(ended.returncode):
        if out_of_memory:
            return AgentEnding(EndReason.RESOURCE_LIMIT, "killed when the environment's memory limit was reached")
        reason = EndReason.AGENT_ERROR if inside else EndReason.INFRASTRUCTURE
        where = "in its environment" if inside else "from outside"
        found = f"killed {where}, by signal {-ended.returncode}: {tail(ended.stderr)}"
        return AgentEnding(reason, _text(found.rstrip(": ")))
    try:
        ending = _shortened(framework.ending(ended))
    except MegaFlowError:
        raise
    except Exception as error:  # what a framework writes may be anything, also what its adapter never saw
        log.exception("agent.ending_not_understood", agent=framework.name)
        found = f"its ending cannot be understood: {error!r}; {tail(ended.stderr)}"
        return AgentEnding(EndReason.AGENT_ERROR, _text(found))
    if inside and ending.reason is EndReason.INFRASTRUCTURE:
        return AgentEnding(EndReason.AGENT_ERROR, ending.detail, ending.steps, ending.usage)
    return ending


def _shortened(ending: AgentEnding) -> AgentEnding:
    """Without counts that are none: they are for a person to read, and change nothing about how it ended."""
    steps: object = ending.steps
    if steps is not None and not _whole(steps):
        log.warning("agent.steps_not_understood", found=f"{steps!r:.80}")
        steps = None
    return AgentEnding(EndReason(ending.reason), _text(ending.detail), steps, _usage(ending.usage))  # type: ignore[arg-type]


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_STEPS


def _usage(value: object) -> dict[str, float]:
    if not isinstance(value, Mapping):
        log.warning("agent.usage_not_understood", found=f"{value!r:.80}")
        return {}
    good = {name: float(count) for name, count in value.items() if _name(name) and _count(count)}
    if len(good) < len(value):
        bad = [f"{name!r:.40}: {count!r:.40}" for name, count in value.items() if name not in good]
        log.warning("agent.usage_not_understood", found=bad[:5])
    return dict(list(good.items())[:_MOST_COUNTS])


def _name(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_NAME and value.isascii() and value.isprintable()


def _count(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value < _LARGEST_COUNT and math.isfinite(value)  # type: ignore[operator,arg-type]


def _text(value: object) -> str:
    """Such as a database takes."""
    return str(value).encode("utf-8", "replace").decode().replace("\0", "")[:_DETAIL_CHARS]
