"""Makes the report of a run: pass rate with its interval, what was lost and why, cost, versions. No I/O."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

from app.errors import ReportRefused
from app.evaluation import statistics
from app.evaluation.statistics import Interval
from app.evaluation.validation import unvalidated_note
from app.ledger.report_rows import ReportRow, RunHead
from app.models.endings import BLAME, Blame, EndReason
from app.models.spec import Wire

__all__ = ["BASELINES", "Report", "Slice", "groups_of", "report_of", "require_headline"]

BASELINES = frozenset({"oracle", "nop", "cheat", "replay"})
"""Agents that say something about tasks and not about a model: reported apart."""
MOST_LOSS = 0.02
"""Share of tasks that infrastructure may lose before a headline is refused."""
_KS = (1, 2, 4, 8, 16, 32, 64)


class Rate(Wire):
    """A pass rate with its 95 % interval."""

    value: float
    low: float
    high: float
    method: str

    @classmethod
    def of(cls, interval: Interval | None) -> Rate | None:
        if interval is None:
            return None
        return cls(value=interval.value, low=interval.low, high=interval.high, method=interval.method)


class Slice(Wire):
    """Some of a run's tasks: all of them, or those of one agent, repository, language or end reason.

    A suspect attempt is scored, with reward 0. What a replay engine answered is neither scored nor lost.
    """

    name: str
    total: int
    scored: int
    solved: int
    suspect: int
    scripted: int
    unfinished: int
    lost: dict[str, int]  # ended and not scored, by cause
    lost_to_infrastructure: int
    rate: Rate | None
    mean_reward: float | None
    pass_at: dict[int, float] = {}
    pass_hat: dict[int, float] = {}
    cost_usd: float | None = None
    cost_per_solved_usd: float | None = None
    agent_s: float | None = None
    grading_s: float | None = None
    seconds_per_solved: float | None = None
    unstable: tuple[str, ...] = ()  # of a baseline: tasks whose replicas do not agree


class Report(Wire):
    """A run as a reviewer wants it: the headline, its parts, and everything that the number depends on."""

    run_id: str
    run: str
    created_at: datetime
    headline: Slice
    baselines: tuple[Slice, ...]
    by: dict[str, tuple[Slice, ...]]  # agent, repository, language, end reason
    versions: dict[str, tuple[str, ...]]  # images, agents, models, graders, limits
    provenance: dict[str, Any] | None
    notes: tuple[str, ...]


def report_of(head: RunHead, rows: Sequence[ReportRow]) -> Report:
    """The report of a run by its rows."""
    measured = [row for row in rows if row.agent not in BASELINES]
    names = sorted({row.agent for row in rows} & BASELINES)
    headline = slice_of("all", measured)
    return Report(
        run_id=str(head.id),
        run=head.name,
        created_at=head.created_at,
        headline=headline,
        baselines=tuple(slice_of(name, [row for row in rows if row.agent == name]) for name in names),
        by={
            "agent": _by(measured, lambda row: f"{row.agent} {row.model or ''}".strip()),
            "repository": _by(measured, repository),
            "language": _by(measured, language),
            "end reason": _by(measured, lambda row: row.end_reason or row.state),
        },
        versions=versions(rows),
        provenance=head.provenance,
        notes=tuple(_notes(headline, rows)),
    )


def require_headline(report: Report) -> None:
    """Raises: ReportRefused: infrastructure has lost more than 2 % of the tasks, so that the rate says little."""
    part = report.headline
    ended = part.total - part.unfinished - part.scripted
    if ended and part.lost_to_infrastructure / ended > MOST_LOSS:
        raise ReportRefused(
            f"run {report.run!r}: infrastructure lost {part.lost_to_infrastructure} of {ended} tasks, more than"
            f" {MOST_LOSS:.0%}: {_listed(part.lost)}; expected less before a pass rate is told; `megaflow retry RUN`"
            " does them again, `--allow-loss` shows the rate all the same"
        )


def slice_of(name: str, rows: Sequence[ReportRow]) -> Slice:
    """The figures of some rows."""
    scored = [row for row in rows if _is_scored(row)]
    groups = groups_of(rows)
    solved = sum(_is_solved(row) for row in scored)
    lost = [row for row in rows if row.end_reason and not row.scripted and not _is_scored(row)]
    costs = [row.cost_usd for row in rows if row.cost_usd is not None]
    times = [seconds for row in rows if (seconds := row.agent_s) is not None]
    graded = [seconds for row in rows if (seconds := row.grading_s) is not None]
    rewards = [_reward(row) for row in scored]
    who = {(row.agent, row.model) for row in rows}  # attempts of several are no replicas of each other
    at_least = {k for k in _KS if len(who) == 1 and any(len(one) >= k for one in groups.values())}
    return Slice(
        name=name,
        total=len(rows),
        scored=len(scored),
        solved=solved,
        suspect=sum(bool(row.verdict.get("suspect")) for row in scored),
        scripted=sum(row.scripted for row in rows),
        unfinished=sum(row.end_reason is None for row in rows),
        lost=dict(Counter(_cause(row) for row in lost).most_common()),
        lost_to_infrastructure=sum(
            BLAME[EndReason(row.end_reason)] is not Blame.PERSON for row in lost if row.end_reason
        ),
        rate=Rate.of(statistics.pass_rate(groups)),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        pass_at={k: found for k in at_least if (found := statistics.pass_at(k, groups)) is not None},
        pass_hat={k: found for k in at_least if (found := statistics.pass_hat(k, groups)) is not None},
        cost_usd=sum(costs) if costs else None,
        cost_per_solved_usd=sum(costs) / solved if costs and solved else None,
        agent_s=sum(times) if times else None,
        grading_s=sum(graded) if graded else None,
        seconds_per_solved=sum(times) / solved if times and solved else None,
        unstable=tuple(sorted(task for task, one in groups.items() if len(set(one)) > 1)) if name in BASELINES else (),
    )


def groups_of(rows: Iterable[ReportRow]) -> dict[str, list[bool]]:
    """By task, of each scored replica whether it was solved."""
    groups: dict[str, list[bool]] = defaultdict(list)
    for row in rows:
        if _is_scored(row):
            groups[row.name].append(_is_solved(row))
    return dict(groups)


def _is_scored(row: ReportRow) -> bool:
    return bool(row.verdict.get("counts")) and not row.scripted


def _reward(row: ReportRow) -> float:
    return 0.0 if row.verdict.get("suspect") else float(row.verdict.get("reward") or 0.0)


def _is_solved(row: ReportRow) -> bool:
    return _reward(row) >= 1.0


def _cause(row: ReportRow) -> str:
    error = row.failure.get("error")
    return f"{row.end_reason} ({error})" if error else str(row.end_reason)


def _by(rows: Sequence[ReportRow], key: Callable[[ReportRow], str]) -> tuple[Slice, ...]:
    parts: dict[str, list[ReportRow]] = defaultdict(list)
    for row in rows:
        parts[key(row)].append(row)
    return tuple(slice_of(name, parts[name]) for name in sorted(parts))


def repository(row: ReportRow) -> str:
    """The task's repository, by its row or by its name's usual form."""
    said = row.spec["task"]["goal"].get("row", {})
    if isinstance(said.get("repo"), str):
        org = said.get("org")
        return f"{org}/{said['repo']}" if isinstance(org, str) else str(said["repo"])
    owner, mark, rest = row.name.partition("__")
    return f"{owner}/{rest.rpartition('-')[0] or rest}" if mark else "unknown"


def language(row: ReportRow) -> str:
    """The task's language, where its row says one."""
    said = row.spec["task"]["goal"].get("row", {})
    found = said.get("language") or said.get("lang") or said.get("repo_language")
    return str(found) if found else "unknown"


def versions(rows: Iterable[ReportRow]) -> dict[str, tuple[str, ...]]:
    """What the figures depend on, each once: images by content, agents, models, graders, limits."""
    found: dict[str, set[str]] = {name: set() for name in ("image", "agent", "model", "grader", "limits")}
    for row in rows:
        spec, task = row.spec, row.spec["task"]
        found["image"].add(str(row.environment.get("image_id") or task["environment"].get("image") or "unknown"))
        found["agent"].add(f"{row.agent} {row.environment.get('agent_version') or 'unknown'}")
        found["model"].add(_model(spec.get("model")))
        found["grader"].add(str(row.verdict.get("grader") or "unknown"))
        found["limits"].add(_limits(task))
    return {name: tuple(sorted(values)) for name, values in found.items()}


def _model(model: dict[str, Any] | None) -> str:
    if model is None:
        return "none"
    sampling = model.get("sampling") or {}
    said = ", ".join(f"{name} {value}" for name, value in sorted(sampling.items()) if value is not None)
    return f"{model['name']} ({said})" if said else str(model["name"])


def _limits(task: dict[str, Any]) -> str:
    limits, resources = task["limits"], task["environment"]["resources"]
    return (
        f"{resources['cpus']:g} cpus, {resources['memory_bytes'] >> 20} MiB, agent {limits['agent_timeout_s']:g} s,"
        f" grading {limits['grading_timeout_s']:g} s, {limits['max_steps']} steps"
    )


def _notes(headline: Slice, rows: Sequence[ReportRow]) -> Iterable[str]:
    if headline.unfinished:
        yield f"{headline.unfinished} of {headline.total} tasks have not ended yet"
    if headline.scripted:
        yield f"{headline.scripted} tasks were answered by the replay engine: not in the pass rate"
    if headline.suspect:
        yield f"{headline.suspect} suspect verdicts count as 0; what they claimed is kept with them"
    if headline.scored and headline.rate is not None and headline.rate.method == "Wilson" and headline.scored < 100:
        yield f"{headline.scored} scored tasks once each: differences below about 10 points are chance"
    if found := unvalidated_note([row.validation for row in rows if row.agent not in BASELINES and _is_scored(row)]):
        yield found
    if not any(row.agent in BASELINES for row in rows):
        yield "oracle and nop were not run with it: that the tasks can be solved and are not solved already is unknown"


def _listed(causes: dict[str, int]) -> str:
    return ", ".join(f"{count} {cause}" for cause, count in causes.items())
