"""Prints tables, JSON, times and scores."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, TypeVar

import typer
from pydantic_core import to_jsonable_python

from app.cli.tables import Cell, SafeConsole, Table
from app.models.outcome import TaskResult
from app.texts import STEPS, lasted, short_id, spans

Row = TypeVar("Row")
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]

console = SafeConsole(markup=False, soft_wrap=not sys.stdout.isatty())
errors = SafeConsole(stderr=True, markup=False)


def say(text: str) -> None:
    """Prints a line for a person on standard error: standard output is for results."""
    errors.print(text)


def as_json(value: Any) -> None:
    """Prints a value as JSON, in ASCII: control characters are escaped."""
    plain = to_jsonable_python(value, fallback=str)
    console.file.write(json.dumps(plain, indent=2).replace("\x7f", "\\u007f") + "\n")


def answer(value: object, text: str, *, json: bool) -> None:
    """Prints the result of a command: as JSON for programs, or in words."""
    if json:
        as_json(value)
    else:
        console.print(text, soft_wrap=True)


def listing(
    rows: Sequence[Row],
    columns: Mapping[str, Callable[[Row], Cell]],
    *,
    json: bool,
    right: Sequence[str] = (),
    empty: str = "",
) -> None:
    """Prints rows as complete JSON, or as a table with these columns. empty: text in place of a table without rows."""
    if json:
        as_json(rows)
        return
    table = Table(*columns, right=right, keys=2)
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    console.print(table if rows or not empty else empty)


def reward(result: TaskResult) -> str:
    """Returns the reward as a number, `-` while there is none; adds `scripted` when a replay engine answered, `suspect`
    when a rule took the reward away."""
    if result.verdict is None or result.reward is None:
        return "-"
    marks = (("suspect", bool(result.verdict.suspect)), ("scripted", result.scripted))
    return " ".join([f"{result.reward:g}", *(word for word, applies in marks if applies)])


def results_table(results: Iterable[TaskResult]) -> Table:
    """Returns one row per task, with the end of its id: end, agent, instance, and the time of each phase."""
    phases = list(STEPS)
    times = [f"{name} time" if name == "agent" else name for name in phases]
    headers = ("id", "task", "reward", "end", "agent", "mode", "attempts", "model", *times, "origin", "instance")
    table = Table(*headers, right=times, keys=6)
    for result in results:
        table.add_row(*_row(result))
    return table


def _row(result: TaskResult) -> list[str]:
    last = result.attempt
    durations = spans(last) if last else {}
    name = f"{result.name}#{result.replica}" if result.replica else result.name
    return [
        short_id(result.task_id)[-8:],
        name,
        reward(result),
        result.end_reason.value if result.end_reason else result.state.value,
        result.agent,
        result.mode.value,
        str(len(result.attempts)),
        result.model or "-",
        *(lasted(durations[phase]) if phase in durations else "-" for phase in STEPS),
        str(last.environment.get("origin", "-")) if last else "-",
        (last.instance or "-") if last else "-",
    ]


def clock(at: datetime | None) -> str:
    return "-" if at is None else f"{at:%H:%M:%S.%f}"[:-3]
