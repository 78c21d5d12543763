"""Shows results as pandas tables, and as HTML in notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from app.errors import DependencyMissing
from app.models.outcome import TaskResult
from app.texts import STEPS, clean, outcome, spans, states, summary

if TYPE_CHECKING:
    import pandas

    from app.ledger.results import RunStatus

_SHOWN = 50
"""Maximum number of tasks shown for a run."""


def frame_of(results: Iterable[TaskResult]) -> pandas.DataFrame:
    """Returns one row per task: agent, outcome, reward (NaN: not scored), seconds by step of its last attempt.

    Raises: DependencyMissing: pandas is not installed.
    """
    try:
        import pandas
    except ModuleNotFoundError:
        raise DependencyMissing("expected the extra `notebook`, found no pandas; pip install '.[notebook]'") from None
    frame = pandas.DataFrame.from_records([_row(one) for one in results])
    numbers = ("reward", *(f"{step}_s" for step in STEPS))
    return frame.astype({name: "float64" for name in numbers if name in frame})


def _row(one: TaskResult) -> dict[str, Any]:
    verdict, last = one.verdict, one.attempt
    seconds = spans(last) if last is not None else {}
    return {
        "task_id": str(one.task_id),
        "run_id": str(one.run_id),
        "name": one.name,
        "replica": one.replica,
        "agent": one.agent,
        "model": one.model,
        "mode": one.mode.value,
        "state": one.state.value,
        "end_reason": one.end_reason.value if one.end_reason else None,
        "reward": one.reward,
        "scored": bool(verdict and verdict.counts),
        "suspect": verdict.suspect if verdict else "",
        "scripted": one.scripted,
        "attempts": len(one.attempts),
        **{f"{step}_s": seconds.get(step) for step in STEPS},
    }


def html_of_run(status: RunStatus, page: str, tasks: Sequence[TaskResult]) -> str:
    """Returns a run as HTML: its summary, a link to its page, and its first tasks. All text is escaped."""
    rows = "".join(
        f"<tr><td>{_cell(one.name)}</td><td>{_cell(one.agent)}</td><td>{_cell(outcome(one))}</td></tr>"
        for one in tasks[:_SHOWN]
    )
    more = f"<p>{len(tasks) - _SHOWN} more</p>" if len(tasks) > _SHOWN else ""
    head = f"<p><b>{_cell(summary(status))}</b><br>{_cell(states(status))}; <a href='{escape(page)}'>its page</a></p>"
    return f"{head}<table><tr><th>task</th><th>agent</th><th>outcome</th></tr>{rows}</table>{more}"


def html_of_task(name: str, page: str, state: str) -> str:
    """Returns a task as HTML: its name, its state, a link to its page."""
    return f"<p>{_cell(name)}: {_cell(state)}; <a href='{escape(page)}'>its page</a></p>"


def _cell(text: str) -> str:
    return escape(clean(text))
