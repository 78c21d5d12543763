"""What runs have shown of their environments: by which paths they came, their networks, which were proven clean."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any
from uuid import UUID

from rich.table import Table

from app.cli.show import console
from app.environments.base import UNSEEN
from app.ledger.environment_times import FAILED
from app.models.outcome import AttemptRecord, TaskResult

_PATHS = ("cold", "warm", "snapshot", "recycled", "shared")


@dataclass(frozen=True, slots=True)
class Seen:
    """One environment as the attempt that had it recorded it."""

    run_id: UUID
    path: str
    network: str
    ready_s: float | None  # what the attempt waited for it
    reset: dict[str, Any] | None  # the proof, when it was to be kept for another


def seen_of(found: Iterable[TaskResult]) -> list[Seen]:
    """Every environment that an attempt had, for its agent and for its grading."""
    return [one for result in found for attempt in result.attempts for one in _of_attempt(result.run_id, attempt)]


def _of_attempt(run_id: UUID, attempt: AttemptRecord) -> list[Seen]:
    told = attempt.environment
    # What is recorded at the end has all of them; until then the agent's own stands beside it.
    each = {"agent": told, **(told.get("teardown") or {})}
    network = str(told.get("network", "none"))
    return [
        Seen(run_id, one["path"], network, one.get("ready_s"), one.get("reset"))
        for one in (each[purpose] for purpose in ("agent", "grading") if purpose in each)
        if one.get("path", FAILED) != FAILED
    ]


def unexpected_paths(seen: list[Seen], *, fresh: UUID) -> list[str]:
    """What a run in containers must have shown and has not. fresh: the run whose environments are used once.

    Replicas share a set-up on every host. A used one is used again wherever a reset can be proven.
    """
    wrong = []
    paths = Counter(one.path for one in seen)
    if not paths["warm"] + paths["snapshot"]:
        wrong.append("no environment was made ahead or from what a set-up left, found only " + _counts(paths))
    if not paths["recycled"] and not _is_blind(seen):
        wrong.append("no environment was used again after a reset, found only " + _counts(paths))
    if again := [one.path for one in seen if one.run_id == fresh and one.path in ("recycled", "shared")]:
        wrong.append(f"expected environments of one attempt each where the task says `fresh`, found {again}")
    return [f"UNEXPECTED: {one}; `megaflow environments` and the workers' logs say more" for one in wrong]


def _is_blind(seen: list[Seen]) -> bool:
    """Whether every reset said that nothing can be proven on this host."""
    left = [one.reset.get("left") for one in seen if one.reset is not None]
    return bool(left) and all(one == [UNSEEN] for one in left)


def print_seen(seen: list[Seen]) -> None:
    """A small table by path, the networks, and the resets."""
    table = Table("environments", "count", "ready p50 ms", header_style="bold", pad_edge=False)
    ready: dict[str, list[float]] = defaultdict(list)
    counts = Counter(one.path for one in seen)
    for one in seen:
        if one.ready_s is not None:
            ready[one.path].append(one.ready_s)
    for path in sorted(counts, key=lambda name: _PATHS.index(name) if name in _PATHS else len(_PATHS)):
        waited = f"{median(ready[path]) * 1000:.0f}" if ready[path] else "-"
        table.add_row(path, str(counts[path]), waited)
    console.print(table)
    resets = [one.reset for one in seen if one.reset is not None]
    clean = sum(bool(one.get("clean")) for one in resets)
    console.print(
        f"networks: {_counts(Counter(one.network for one in seen))};"
        f" {clean} of {len(resets)} that were reset were proven clean",
        highlight=False,
    )


def _counts(found: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in found.most_common()) or "none"
