"""What the command line prints: tables, progress, JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from app.models.outcome import AttemptRecord, Phase, TaskResult

if TYPE_CHECKING:
    from app.ledger.results import RunStatus

_PIPED_WIDTH = 180
"""Columns when nobody's terminal says how many there are."""

console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
errors = Console(stderr=True)

_SPANS: tuple[tuple[str, Phase, Phase], ...] = (
    ("wait", Phase.ACCEPTED, Phase.ADMITTED),
    ("start", Phase.ADMITTED, Phase.CLAIMED),
    ("image", Phase.CLAIMED, Phase.IMAGE_READY),
    ("env", Phase.IMAGE_READY, Phase.ENVIRONMENT_READY),
    ("agent", Phase.AGENT_STARTED, Phase.AGENT_ENDED),
    ("grade", Phase.AGENT_ENDED, Phase.GRADED),
    ("store", Phase.GRADED, Phase.STORED),
    ("down", Phase.STORED, Phase.TORN_DOWN),
)


def say(text: str) -> None:
    """A line for a person, on standard error: standard output is for results."""
    errors.print(text, highlight=False, markup=False)


def as_json(value: Any) -> None:
    """Print a value as JSON."""
    console.print_json(json.dumps(value, default=_plain))


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)


def spans(attempt: AttemptRecord) -> dict[str, float]:
    """Seconds by station; a station that was not passed is left out."""
    phases = attempt.phases
    return {
        name: (phases[end] - phases[begin]).total_seconds()
        for name, begin, end in _SPANS
        if begin in phases and end in phases
    }


def limit_lines(attempt: AttemptRecord) -> list[str]:
    """Whom the kernel killed or refused for a limit of the environment, in words; nothing where that met nobody."""
    memory, processes = (attempt.environment.get(name, {}) for name in ("memory", "processes"))
    lines = _killed_line("", memory)
    for name, one in memory.get("services", {}).items():
        lines += _killed_line(f"service {name}: ", one)
    if refused := _by_stage(processes.get("refused", {})):
        lines.append(f"too many processes: {refused[0]} refused at the limit of {processes['limit']} {refused[1]}")
    return lines


def _killed_line(where: str, told: dict[str, Any]) -> list[str]:
    if not (killed := _by_stage(told.get("killed", {}))):
        return []
    return [f"{where}out of memory: {killed[0]} killed at the memory limit of {told['limit_bytes']} bytes {killed[1]}"]


def _by_stage(counts: dict[str, int]) -> tuple[int, str] | None:
    """How many in all, and the stages that had any; None where there were none."""
    told = ", ".join(f"{count} in {stage}" for stage, count in counts.items() if count)
    return (sum(counts.values()), f"({told})") if told else None


def reward(result: TaskResult) -> str:
    """A number, or `-` when nothing was measured; with the word `scripted` when a replay engine answered."""
    if result.reward is None:
        return "-"
    return f"{result.reward:g} scripted" if result.scripted else f"{result.reward:g}"


def results_table(results: Iterable[TaskResult]) -> Table:
    """One row per task: who did it where, how it ended, how long each station took."""
    table = Table(header_style="bold", pad_edge=False)
    for column in ("task", "agent", "model", "mode", "instance", "env", "end reason"):
        table.add_column(column, overflow="fold")
    for column in ("reward", "tries", *(f"{name} s" for name, _, _ in _SPANS)):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        table.add_row(*_row(result))
    return table


def _row(result: TaskResult) -> list[str]:
    last = result.attempt
    taken = spans(last) if last else {}
    good = result.reward is not None
    return [
        result.name,
        result.agent,
        result.model or "-",
        result.mode.value,
        (last.instance or "-") if last else "-",
        str(last.environment.get("origin", "-")) if last else "-",
        result.end_reason.value if result.end_reason else result.state.value,
        reward(result) if good else "[yellow]not measured",
        str(len(result.attempts)),
        *(f"{taken[name]:.2f}" if name in taken else "-" for name, _, _ in _SPANS),
    ]


def runs_table(statuses: Sequence[RunStatus]) -> Table:
    """One row per run, scores with their valid denominator."""
    table = Table(header_style="bold", pad_edge=False)
    for column in (
        "run",
        "name",
        "user",
        "submitted",
        "tasks",
        "states",
        "resolved / measured",
        "scripted",
        "mean reward",
    ):
        table.add_column(column)
    for status in statuses:
        table.add_row(
            str(status.id),
            status.name,
            status.user_name,
            f"{status.created_at:%Y-%m-%d %H:%M:%S}",
            str(status.total),
            states(status),
            f"{status.resolved} / {status.measured}",
            f"{status.scripted_resolved} / {status.scripted}" if status.scripted else "-",
            "-" if status.mean_reward is None else f"{status.mean_reward:.3f}",
        )
    return table


def states(status: RunStatus) -> str:
    """`3 running, 8 succeeded`."""
    return ", ".join(f"{count} {state}" for state, count in sorted(status.states.items()))


def summary(status: RunStatus) -> str:
    """The score with its denominator, and what the infrastructure lost."""
    lost = status.ended - status.measured - status.scripted
    mean = "-" if status.mean_reward is None else f"{status.mean_reward:.3f}"
    loss = f"; {lost} of {status.total} not measured" if lost else ""
    scripted = f"solved {status.scripted_resolved}/{status.scripted} scripted" if status.scripted else ""
    if scripted and not status.measured:
        return f"{status.name}: {scripted}{loss}"
    measured = f"{status.resolved} of {status.measured} measured resolved, mean reward {mean}"
    return f"{status.name}: {measured}{f'; {scripted}' if scripted else ''}{loss}"


def clock(at: datetime | None) -> str:
    return "-" if at is None else f"{at:%H:%M:%S.%f}"[:-3]
