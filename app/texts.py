"""Formats results and times for the command line and the web pages. No I/O."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from uuid import UUID

from app.models.outcome import AttemptRecord, Phase, TaskResult
from app.models.resources import Resources
from app.models.states import ENDED_TASK

if TYPE_CHECKING:
    from app.ledger.results import RunStatus

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]*[0-~]?)")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def clean(text: str) -> str:
    """Removes terminal escape sequences, control and bidirectional characters; line breaks and tabs stay."""
    return _CONTROLS.sub("", _ESCAPES.sub("", text))


_SPANS: tuple[tuple[str, Phase, Phase], ...] = (
    ("wait", Phase.ACCEPTED, Phase.ADMITTED),
    ("start", Phase.ADMITTED, Phase.CLAIMED),
    ("image", Phase.CLAIMED, Phase.IMAGE_READY),
    ("env", Phase.IMAGE_READY, Phase.ENVIRONMENT_READY),
    ("agent", Phase.AGENT_STARTED, Phase.AGENT_ENDED),
    ("hand over", Phase.AGENT_ENDED, Phase.GRADING_QUEUED),
    ("queue", Phase.GRADING_QUEUED, Phase.GRADING_STARTED),
    ("grade", Phase.AGENT_ENDED, Phase.GRADED),
    ("store", Phase.GRADED, Phase.STORED),
    ("down", Phase.STORED, Phase.TORN_DOWN),
)


STEPS = tuple(name for name, _, _ in _SPANS)
"""Names of the steps that `spans` returns, in order."""


def counted(count: int, noun: str) -> str:
    """Formats a count with its noun: `1 task`, `2 tasks`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def spans(attempt: AttemptRecord) -> dict[str, float]:
    """Returns the seconds of each step; a step that the attempt did not pass is omitted."""
    phases = attempt.phases
    seconds = {
        name: (phases[end] - phases[begin]).total_seconds()
        for name, begin, end in _SPANS
        if begin in phases and end in phases
    }
    if "grade" in seconds and Phase.GRADING_STARTED in phases:  # graded apart: exclude hand-over and queue
        seconds["grade"] = (phases[Phase.GRADED] - phases[Phase.GRADING_STARTED]).total_seconds()
    return seconds


def limit_lines(attempt: AttemptRecord) -> list[str]:
    """Describes the environment's size, and which of its processes the kernel killed, refused or throttled."""
    memory, processes, cpu = (attempt.environment.get(name, {}) for name in ("memory", "processes", "cpu"))
    sizes = attempt.environment.get("resources")
    lines = [f"resources: {Resources.model_validate(sizes).label}"] if sizes else []
    lines += _killed_line("", memory)
    if by_host := _by_stage(memory.get("killed_by_host", {})):
        lines.append(f"the host was short of memory: {by_host[0]} killed {by_host[1]}, not for the task's limit")
    for name, one in memory.get("services", {}).items():
        lines += _killed_line(f"service {name}: ", one)
    if refused := _by_stage(processes.get("refused", {})):
        lines.append(f"too many processes: {refused[0]} refused at the limit of {processes['limit']} {refused[1]}")
    if held_up := _by_stage(cpu.get("throttled_s", {})):
        lines.append(f"throttled: {held_up[0]:.1f} s at the limit of {cpu['limit']:g} processors {held_up[1]}")
    return lines


def _killed_line(where: str, told: dict[str, Any]) -> list[str]:
    if not (killed := _by_stage(told.get("killed", {}))):
        return []
    return [f"{where}out of memory: {killed[0]} killed at the memory limit of {told['limit_bytes']} bytes {killed[1]}"]


def _by_stage(counts: dict[str, float]) -> tuple[float, str] | None:
    """Returns the total and the stages that had any; None when there were none."""
    stages = ", ".join(f"{count} in {stage}" for stage, count in counts.items() if count)
    return (sum(counts.values()), f"({stages})") if stages else None


def short_id(identity: UUID) -> str:
    """Returns the end of an id, which every command accepts: ids made together begin alike."""
    return str(identity)[-12:]


def solved(status: RunStatus) -> str:
    """Formats the solved count: `5/6` scored, of them `(1 suspect)`; tasks with scripted answers are counted apart."""
    scored = f"{status.resolved}/{status.scored}" if status.scored or not status.scripted else ""
    if status.suspect:
        scored += f" ({status.suspect} suspect)"
    scripted = f"{status.scripted_resolved}/{status.scripted} scripted" if status.scripted else ""
    return " + ".join(filter(None, (scored, scripted)))


def grading_cost(seconds: float | None, usd: float | None) -> str:
    """Formats how long verifiers worked and what that cost; empty when unknown."""
    cost = "" if usd is None else f", ${usd:,.4f}"
    return "" if seconds is None else f"{lasted(seconds)}{cost}"


def lasted(seconds: float) -> str:
    """Formats a duration: `0.25s`, `48s`, `3m12s`, `2h05m`, `3d02h`, with two units at most."""
    if seconds < 10:
        return f"{max(0.0, seconds):.2f}s"
    whole = round(seconds)
    for size, unit, below, unit_below in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // below:02}{unit_below}"
    return f"{whole}s"


def states(status: RunStatus) -> str:
    """Formats the counts by state: `3 running, 8 succeeded`; superseded tasks are counted apart from cancelled ones."""
    counts = dict(status.states)
    if status.superseded:
        counts["superseded"] = status.superseded
        counts["cancelled"] -= status.superseded
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items()) if count)


def summary(status: RunStatus, interval: str = "") -> str:
    """Formats the score with its denominator and interval, and the tasks lost to the infrastructure."""
    lost = status.ended - status.scored - status.scripted - status.superseded
    mean = "-" if status.mean_reward is None else f"{status.mean_reward:.3f}"
    loss = f"; {lost} of {status.total} not scored" if lost else ""
    scripted = f"solved {status.scripted_resolved}/{status.scripted} scripted" if status.scripted else ""
    if scripted and not status.scored:
        return f"{status.name}: {scripted}{loss}"
    scored = f"{status.resolved} of {status.scored} scored solved{interval}, mean reward {mean}"
    if status.rewards_outside:
        scored += f" ({status.rewards_outside} of {status.scored} rewards outside 0..1)"
    if status.suspect:
        scored += f", {status.suspect} suspect counted as 0"
    return f"{status.name}: {scored}{f'; {scripted}' if scripted else ''}{loss}"


def outcome(result: TaskResult) -> str:
    """Describes on one line how a task ended and why."""
    last = result.attempt
    if result.verdict is not None and result.reward is not None:
        scripted = ", by scripted answers" if result.scripted else ""
        return f"{result.state.value}: reward {result.reward:g}, {result.end_reason}{scripted}"
    if last is None or result.state not in ENDED_TASK:
        phase = f" in phase {list(last.phases)[-1].value}" if last is not None and last.phases else ""
        return f"{result.state.value}{phase}, attempt {len(result.attempts)}" if last else result.state.value
    failure = last.failure or result.failure
    why = f": {' '.join(failure.message.split())}" if failure is not None else ""
    count = f", {len(result.attempts)} attempt{'s' if len(result.attempts) > 1 else ''}"
    return f"{result.state.value}: {result.end_reason or 'not scored'}{count}{why}"
