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
    lent: bool = False  # read-only, to all of its run who wanted one at the time
    several: bool = False  # containers


def seen_of(found: Iterable[TaskResult]) -> list[Seen]:
    """Every environment that an attempt had, for its agent and for its grading."""
    return [one for result in found for attempt in result.attempts for one in _of_attempt(result.run_id, attempt)]


def _of_attempt(run_id: UUID, attempt: AttemptRecord) -> list[Seen]:
    told = attempt.environment
    # What is recorded at the end has all of them; until then the agent's own stands beside it.
    each = {"agent": told, **(told.get("teardown") or {})}
    network = str(told.get("network", "none"))
    several = bool(told.get("services"))
    return [
        Seen(
            run_id,
            path=each[purpose]["path"],
            network=network,
            ready_s=each[purpose].get("ready_s"),
            reset=each[purpose].get("reset"),
            lent=purpose == "agent" and bool(told.get("shared")),
            several=several,
        )
        for purpose in ("agent", "grading")
        if each.get(purpose, {}).get("path", FAILED) != FAILED
    ]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a demo in containers must show. fresh, shared: the runs of that reuse.

    ahead: so much had to wait that some environments must have been made meanwhile.
    """

    fresh: UUID
    shared: UUID
    ahead: bool


def unexpected_paths(seen: list[Seen], asked: Asked) -> list[str]:
    """What the runs must have shown and have not.

    Replicas share a set-up on every host. A used one is used again wherever a reset can be proven.
    """
    wrong = []
    paths = Counter(one.path for one in seen)
    if not paths["snapshot"]:
        wrong.append("no environment was made from what a set-up left, found only " + _counts(paths))
    if asked.ahead and not paths["warm"]:
        wrong.append("no environment was made ahead, found only " + _counts(paths))
    if not paths["recycled"] and not _is_blind(seen):
        wrong.append("no environment was used again after a reset, found only " + _counts(paths))
    if again := [one.path for one in seen if one.run_id == asked.fresh and one.path in ("recycled", "shared")]:
        wrong.append(f"expected environments of one attempt each where the task says `fresh`, found {again}")
    if not any(one.lent for one in seen if one.run_id == asked.shared):
        wrong.append("no environment was lent to several attempts where the task says `shared-readonly`")
    return [f"UNEXPECTED: {one}; `megaflow environments` and the workers' logs say more" for one in wrong]


def _is_blind(seen: list[Seen]) -> bool:
    """Whether every reset said that nothing can be proven on this host."""
    left = [one.reset.get("left") for one in seen if one.reset is not None]
    return bool(left) and all(one == [UNSEEN] for one in left)


def print_seen(seen: list[Seen], beside: Iterable[str] = ()) -> None:
    """A small table by path, the networks, the resets, and in words what was used. beside: what else was done."""
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
    for line in (_used(seen, counts), *beside):
        console.print(line, highlight=False, markup=False)


def _used(seen: list[Seen], paths: Counter[str]) -> str:
    """How environments came about; what was not used is named, too."""
    each = (
        ("made ahead", paths["warm"]),
        ("made from what a set-up left", paths["snapshot"]),
        ("used again after a reset", paths["recycled"]),
        ("lent read-only to several attempts", sum(one.lent for one in seen)),
        ("of several containers", sum(one.several for one in seen)),
    )
    return "environments " + ", ".join(f"{name}: {count or 'none'}" for name, count in each)


def _counts(found: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in found.most_common()) or "none"
