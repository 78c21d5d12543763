"""Builds the report of a run: pass rate with its interval, lost tasks and causes, cost, versions. No I/O."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime
from typing import Any, TypeVar

from app.errors import ReportRefused
from app.evaluation import statistics
from app.evaluation.statistics import Rate
from app.evaluation.validation import flipped_tests, unvalidated_note
from app.grading.base import BROKE_GRADING
from app.ledger.report_rows import ReportRow
from app.ledger.results import RunHead
from app.models.endings import BLAME, Blame, EndReason
from app.models.resources import Resources
from app.models.spec import Wire

BASELINES = frozenset({"oracle", "nop", "cheat", "replay"})
"""Agents that measure tasks and not a model: reported separately."""
MOST_LOSS = 0.02
"""Share of tasks that infrastructure may lose before a headline is refused."""
_ALWAYS_THE_SAME = frozenset({"oracle", "nop"})
"""Agents whose replicas all run one solution, even if that is no patch."""
_OF_ONE_AGENT = ("rate", "mean_reward", "cost_per_solved_usd", "seconds_per_solved")
"""Figures that mean nothing for several agents or models together."""
Number = TypeVar("Number", int, float)
_KS = (1, 2, 4, 8, 16, 32, 64)


class Slice(Wire):
    """Some of a run's tasks: all of them, or those of one agent, repository, language or end reason.

    A suspect attempt is scored, with reward 0. Attempts answered by a replay engine are neither scored nor lost.
    """

    name: str
    total: int
    scored: int
    solved: int
    suspect: int
    regraded: int
    scripted: int
    unfinished: int
    lost: dict[str, int]  # ended and not scored, by cause
    lost_to_infrastructure: int
    memory_kills: int | None  # processes killed at a memory limit of their task; None: not counted
    throttled_s: float | None  # by the CPU limit
    out_of_time: int  # tasks ended by the agent's timeout
    rate: Rate | None
    mean_reward: float | None
    rewards_outside: int  # scored rewards below 0 or above 1
    pass_at: dict[int, float] = {}
    pass_hat: dict[int, float] = {}
    cost_usd: float | None = None
    cost_per_solved_usd: float | None = None
    agent_s: float | None = None
    grading_s: float | None = None
    grading_usd: float | None = None  # of the slots used for grading, where a price is known
    seconds_per_solved: float | None = None
    unstable: tuple[str, ...] = ()  # of a baseline: tasks whose replicas do not agree


class Report(Wire):
    """A run's report for reviewers: the headline, its parts, and everything that the numbers depend on."""

    run_id: str
    run: str
    created_at: datetime
    headline: Slice  # of several agents or models: their sums, without a rate
    baselines: tuple[Slice, ...]
    by: dict[str, tuple[Slice, ...]]  # agent, repository, language, end reason; of several agents each by itself
    versions: dict[str, tuple[str, ...]]  # images, agents, models, prompts, graders, limits, resources
    provenance: dict[str, Any] | None
    flaky: dict[str, tuple[str, ...]]  # by task, the tests whose outcome differed between runs of one solution
    notes: tuple[str, ...]


def report_of(head: RunHead, rows: Sequence[ReportRow]) -> Report:
    """Builds the report of a run from its rows."""
    measured = [row for row in rows if row.agent not in BASELINES]
    names = sorted({row.agent for row in rows} & BASELINES)
    agents, flaky = _by(measured, _who), flaky_tests(rows)
    headline, several = slice_of("all", measured), len(agents) > 1
    if several:
        headline = headline.model_copy(update=dict.fromkeys(_OF_ONE_AGENT))

    def by(key: Callable[[ReportRow], str]) -> tuple[Slice, ...]:
        return _by(measured, lambda row: f"{_who(row)}: {key(row)}" if several else key(row))

    return Report(
        run_id=str(head.id),
        run=head.name,
        created_at=head.created_at,
        headline=headline,
        baselines=tuple(slice_of(name, [row for row in rows if row.agent == name]) for name in names),
        by={
            "agent": agents,
            "repository": by(repository),
            "language": by(language),
            "end reason": by(lambda row: row.end_reason or row.state),
        },
        versions=versions(rows),
        provenance=head.provenance,
        flaky=flaky,
        notes=tuple(_notes(headline, agents, rows, flaky)),
    )


def require_headline(report: Report) -> None:
    """Raises: ReportRefused: infrastructure has lost more than 2 % of an agent's tasks: its rate says little."""
    for part in report.by["agent"]:
        ended = part.total - part.unfinished - part.scripted
        if ended and part.lost_to_infrastructure / ended > MOST_LOSS:
            of = f" of {part.name}" if len(report.by["agent"]) > 1 else ""
            raise ReportRefused(
                f"run {report.run!r}: infrastructure lost {part.lost_to_infrastructure} of {ended} tasks{of}, more"
                f" than {MOST_LOSS:.0%}: {causes_of(part)}; expected less before a pass rate is told; `megaflow"
                " retry RUN` does them again, `--allow-loss` shows the rate all the same"
            )


def slice_of(name: str, rows: Sequence[ReportRow]) -> Slice:
    """Computes the figures of some rows."""
    scored = [row for row in rows if _is_scored(row)]
    groups = groups_of(rows)
    solved = sum(_is_solved(row) for row in scored)
    unscored = [row for row in rows if row.end_reason and not row.scripted and not _is_scored(row)]
    lost = [row for row in unscored if row.end_reason != EndReason.SUPERSEDED]
    costs = [row.cost_usd for row in rows if row.cost_usd is not None]
    times = [seconds for row in rows if (seconds := row.agent_s) is not None]
    rewards = [_reward(row) for row in scored]
    who = {(row.agent, row.model) for row in rows}  # attempts of different ones are no replicas of each other
    most = max(map(len, groups.values()), default=0) if len(who) == 1 else 0
    at_least = sorted({k for k in (*_KS, most) if 0 < k <= most})
    return Slice(
        name=name,
        total=len(rows),
        scored=len(scored),
        solved=solved,
        suspect=sum(bool(row.verdict.get("suspect")) for row in scored),
        regraded=sum(bool(row.verdict.get("regraded_at")) for row in rows),
        scripted=sum(row.scripted for row in rows),
        unfinished=sum(row.end_reason is None for row in rows),
        lost=dict(Counter(_cause(row) for row in lost).most_common()),
        lost_to_infrastructure=sum(
            BLAME[EndReason(row.end_reason)] is not Blame.PERSON for row in lost if row.end_reason
        ),
        memory_kills=_sum(row.memory_kills for row in rows),
        throttled_s=_sum(row.throttled_s for row in rows),
        out_of_time=sum(row.end_reason == EndReason.AGENT_TIMEOUT for row in rows),
        rate=statistics.pass_rate(groups),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        rewards_outside=sum(not 0 <= one <= 1 for one in rewards),
        pass_at={k: value for k in at_least if (value := statistics.pass_at(k, groups)) is not None},
        pass_hat={k: value for k in at_least if (value := statistics.pass_hat(k, groups)) is not None},
        cost_usd=sum(costs) if costs else None,
        cost_per_solved_usd=sum(costs) / solved if costs and solved else None,
        agent_s=sum(times) if times else None,
        grading_s=_sum(row.grading_s for row in rows),
        grading_usd=_sum(row.grading_usd for row in rows),
        seconds_per_solved=sum(times) / solved if times and solved else None,
        unstable=tuple(sorted(task for task, one in groups.items() if len(set(one)) > 1)) if name in BASELINES else (),
    )


def _sum(values: Iterable[Number | None]) -> Number | None:
    """Sums the known values; None: none is known."""
    known = [one for one in values if one is not None]
    return sum(known[1:], known[0]) if known else None


def groups_of(rows: Iterable[ReportRow]) -> dict[str, list[bool]]:
    """Returns by task, for each scored replica, whether it was solved."""
    groups: dict[str, list[bool]] = defaultdict(list)
    for row in rows:
        if _is_scored(row):
            groups[row.name].append(_is_solved(row))
    return dict(groups)


def flaky_tests(rows: Iterable[ReportRow]) -> dict[str, tuple[str, ...]]:
    """Returns by task the tests whose outcome differed between runs of one patch, or found flaky by validation."""
    flaky: dict[str, set[str]] = defaultdict(set)
    runs: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        flaky[row.name].update(row.flipped)
        solution = row.patch_sha256 or (row.agent if row.agent in _ALWAYS_THE_SAME else "")
        if solution and row.verdict.get("counts"):
            runs[row.name, solution].append(row.verdict.get("tests") or {})
    for (task, _), tests in runs.items():
        flaky[task].update(flipped_tests(tests))
    return {task: tuple(sorted(names)) for task, names in sorted(flaky.items()) if names}


def _is_scored(row: ReportRow) -> bool:
    return bool(row.verdict.get("counts")) and not row.scripted


def _reward(row: ReportRow) -> float:
    return 0.0 if row.verdict.get("suspect") else float(row.verdict.get("reward") or 0.0)


def _is_solved(row: ReportRow) -> bool:
    return _reward(row) >= 1.0


def _cause(row: ReportRow) -> str:
    error = row.failure.get("error") or ("not scored when regraded" if row.verdict.get("regraded_at") else None)
    return f"{row.end_reason} ({error})" if error else str(row.end_reason)


def _by(rows: Sequence[ReportRow], key: Callable[[ReportRow], str]) -> tuple[Slice, ...]:
    parts: dict[str, list[ReportRow]] = defaultdict(list)
    for row in rows:
        parts[key(row)].append(row)
    return tuple(slice_of(name, parts[name]) for name in sorted(parts))


def repository(row: ReportRow) -> str:
    """Returns the task's repository, from its row or from the usual form of its name."""
    fields = row.spec["task"]["goal"].get("row", {})
    if isinstance(fields.get("repo"), str):
        org = fields.get("org")
        return f"{org}/{fields['repo']}" if isinstance(org, str) else str(fields["repo"])
    owner, mark, rest = row.name.partition("__")
    return f"{owner}/{rest.rpartition('-')[0] or rest}" if mark else "unknown"


def language(row: ReportRow) -> str:
    """Returns the task's language, if its row has one."""
    fields = row.spec["task"]["goal"].get("row", {})
    name = fields.get("language") or fields.get("lang") or fields.get("repo_language")
    return str(name) if name else "unknown"


_VERSIONS = ("image", "agent", "model", "prompt", "tests", "grader", "limits", "resources", "reward range")


def versions(rows: Iterable[ReportRow]) -> dict[str, tuple[str, ...]]:
    """Returns the versions that the figures depend on, each once. Images are identified by content.

    A prompt is the input that an agent had besides its own: its arguments, and the texts of all tasks, each by digest.
    Tests are the goals of all tasks, by digest.
    """
    result: dict[str, set[str]] = {name: set() for name in _VERSIONS}
    texts: set[tuple[str, str]] = set()
    goals: dict[str, dict[str, Any]] = {}
    for row in rows:
        spec, task = row.spec, row.spec["task"]
        result["image"].add(str(row.environment.get("image_id") or task["environment"].get("image") or "unknown"))
        result["agent"].add(f"{row.agent} {row.environment.get('agent_version') or 'unknown'}")
        result["model"].add(_model(spec.get("model")))
        texts.add((row.name, task["description"]))
        goals[row.name] = {name: value for name, value in task["goal"].items() if value}
        if given := spec.get("agent_args"):
            result["prompt"].add(f"{', '.join(sorted(given))} {_digest(sorted(given.items()))}")
        if row.verdict.get("grader") or (row.verdict and not str(row.verdict.get("detail")).startswith(BROKE_GRADING)):
            result["grader"].add(str(row.verdict.get("grader") or "unknown"))
        limits = task["limits"]
        times = f"agent {limits['agent_timeout_s']:g} s, grading {limits['grading_timeout_s']:g} s"
        result["limits"].add(f"{times}, {limits['max_steps']} steps")
        result["resources"].add(resources_of(row).label)
        result["reward range"].add(_reward_range(task["goal"]))
    if texts:
        result["prompt"].add(f"texts of tasks {_digest(sorted(texts))}")
        result["tests"].add(f"of tasks {_digest(sorted(goals.items()))}")
    return {name: tuple(sorted(values or {"unknown"})) for name, values in result.items()}


def _digest(said: object) -> str:
    return f"sha256:{hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]}"


def _model(model: dict[str, Any] | None) -> str:
    if model is None:
        return "none"
    sampling = model.get("sampling") or {}
    options = ", ".join(f"{name} {value}" for name, value in sorted(sampling.items()) if value is not None)
    return f"{model['name']} ({options})" if options else str(model["name"])


def resources_of(row: ReportRow) -> Resources:
    """Returns the task's guaranteed and maximum resources."""
    return Resources.model_validate(row.spec["task"]["environment"]["resources"])


def _reward_range(goal: dict[str, Any]) -> str:
    bounds = (0, 1) if goal["kind"] == "tests" else goal.get("reward_range")
    return f"{bounds[0]:g} to {bounds[1]:g}" if bounds else "not stated by the task"


def _who(row: ReportRow) -> str:
    return f"{row.agent} {row.model or ''}".strip()


def _notes(
    headline: Slice, agents: Sequence[Slice], rows: Sequence[ReportRow], flaky: Collection[str]
) -> Iterable[str]:
    if headline.unfinished:
        yield f"{headline.unfinished} of {headline.total} tasks have not ended yet"
    if headline.scripted:
        yield f"{headline.scripted} tasks were answered by the replay engine: not in the pass rate"
    if headline.suspect:
        yield f"{headline.suspect} suspect verdicts count as 0; what they claimed is kept with them"
    for part in agents:
        yield from _notes_of(part, f"{part.name}: " if len(agents) > 1 else "")
    if regraded := sum(bool(row.verdict.get("regraded_at")) for row in rows):
        yield f"{regraded} regraded: judged again from their kept test reports (`megaflow show TASK` has both verdicts)"
    if flaky:
        have = "1 task has" if len(flaky) == 1 else f"{len(flaky)} tasks have"
        yield f"{have} flaky tests, which make rewards chance in part (`megaflow dataset validate`)"
    if note := unvalidated_note([row.validation for row in rows if row.agent not in BASELINES and _is_scored(row)]):
        yield note
    if not any(row.agent in BASELINES for row in rows):
        yield "oracle and nop were not run with it: that the tasks can be solved and are not solved already is unknown"


def _notes_of(part: Slice, name: str) -> Iterable[str]:
    """Yields notes on one agent's rate. name: the agent's, if there are several."""
    if part.rewards_outside and part.mean_reward is not None:
        yield (
            f"{name}{part.rewards_outside} of {part.scored} rewards lie outside 0..1: the mean reward,"
            f" {part.mean_reward:.3f}, is no share of what could be had"
        )
    if part.scored and part.rate is not None and part.rate.method == "Wilson" and part.scored < 100:
        # half the width of a difference's 95 % interval if both rates are 50 %
        points = min(100.0, 196 * (0.5 / part.scored) ** 0.5)
        yield f"{name}{part.scored} scored tasks once each: differences below about {points:.0f} points are chance"


def causes_of(part: Slice) -> str:
    """Lists why tasks were not scored, each cause with its count."""
    return ", ".join(f"{count} {cause}" for cause, count in part.lost.items())
