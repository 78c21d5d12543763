"""The judge: reads what was recorded, as a checker of a queue does, and says of every task how it went.

ok: an end that is right for it. lost: accepted, and without an end. duplicated: carried out twice, as far as writes and
witnesses tell. unexpected: a wrong end, a broken promise, something left behind, or a fault that never struck.
recovered: needed another attempt and got an end.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from uuid import UUID

from tests.chaos import work as works
from tests.chaos.fixture import Batch, Fixture
from tests.chaos.launchers import faults

_SLOW_S = 30.0
"""A recovery that took longer is told of."""
_ENDED = {"succeeded", "failed", "cancelled"}


@dataclass
class Verdict:
    """What came of one case. Times in seconds."""

    case: str
    tasks: int = 0
    ok: int = 0
    lost: int = 0
    duplicated: int = 0
    unexpected: int = 0
    recovered: int = 0
    recovery_p50_s: float | None = None
    recovery_p99_s: float | None = None
    recovery_s: list[float] = field(default_factory=list)
    faults: int = 0
    attempts: int = 0
    took_s: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not (self.lost or self.duplicated or self.unexpected)


def judge(case: str, fixture: Fixture, *, least_faults: int) -> Verdict:
    """Everything about a case that has ended and whose programs were stopped."""
    found = Verdict(case, notes=list(fixture.notes))
    record = _Record(fixture)
    for batch in fixture.batches:
        _judge_batch(batch, record, fixture, found)
    wrong = [*fixture.wrong, *_strangers(fixture, record), *_promises(fixture, record), *fixture.left_behind()]
    struck = [(fault["t"], fault["at"]) for fault in faults.struck(fixture.faults_folder)]
    all_faults = sorted(struck + fixture.struck_at)
    found.faults = len(all_faults) + fixture.simulated_faults
    if found.faults < least_faults:
        wrong.append(f"expected at least {least_faults} faults, found {found.faults}: the case broke nothing")
    found.unexpected += len(wrong)
    found.notes += [f"unexpected: {what}" for what in wrong]
    found.attempts = len(record.attempts)
    _recovery(record, [at for at, _ in all_faults], found)
    return found


class _Record:
    """What the ledger holds in the end."""

    def __init__(self, fixture: Fixture) -> None:
        self.tasks: dict[UUID, Any] = {
            row.id: row for row in fixture.rows("SELECT id, run_id, name, state, end_reason, attempts FROM tasks")
        }
        self.attempts: list[Any] = fixture.rows(
            "SELECT id, task_id, number, state, mode, instance_id, end_reason, failure->>'message' AS message,"
            " extract(epoch FROM dispatched_at)::float8 AS dispatched, extract(epoch FROM claimed_at)::float8"
            " AS claimed, extract(epoch FROM finished_at)::float8 AS finished FROM attempts ORDER BY task_id, number"
        )
        self.of_task: dict[UUID, list[Any]] = defaultdict(list)
        for attempt in self.attempts:
            self.of_task[attempt.task_id].append(attempt)
        self.late = {
            row.task_id: row.kinds
            for row in fixture.rows(
                # An attempt's facts after its end, by another transaction than the one that ended it.
                "SELECT e.task_id, string_agg(DISTINCT e.kind, ', ') AS kinds FROM events e JOIN ("
                " SELECT attempt_id, min(id) AS id, min(txid) AS txid FROM events WHERE kind IN"
                " ('attempt.finished', 'attempt.lost', 'attempt.interrupted', 'attempt.cancelled', 'attempt.error')"
                " GROUP BY attempt_id) ended ON ended.attempt_id = e.attempt_id"
                " WHERE e.id > ended.id AND e.txid <> ended.txid AND e.kind <> 'attempt.torn_down'"
                " AND e.kind LIKE 'attempt.%' GROUP BY e.task_id"
            )
        }


def _judge_batch(batch: Batch, record: _Record, fixture: Fixture, found: Verdict) -> None:
    for task_id, name in zip(batch.task_ids, batch.names, strict=True):
        found.tasks += 1
        task = record.tasks.get(task_id)
        attempts = record.of_task[task_id]
        if task is None:
            found.lost += 1
            found.notes.append(f"lost: {name} was accepted and is not there")
        elif task.state not in _ENDED:
            found.lost += 1
            found.notes.append(f"lost: {name} is {task.state}, attempts {_story(attempts)}")
        elif doubled := [*_doubled(task_id, attempts, record), *_overlaps(name, batch, fixture)]:
            found.duplicated += 1
            found.notes.append(f"duplicated: {name}: {'; '.join(doubled)}; attempts {_story(attempts)}")
        elif (task.state, task.end_reason) not in batch.allowed:
            found.unexpected += 1
            last = (attempts[-1].message or "")[:300] if attempts else ""
            found.notes.append(
                f"unexpected: {name} ended {task.state}/{task.end_reason}, attempts {_story(attempts)}; {last}"
            )
        else:
            found.ok += 1
            found.recovered += len(attempts) > 1


def _doubled(task_id: UUID, attempts: list[Any], record: _Record) -> Iterator[str]:
    if sum(attempt.state == "finished" for attempt in attempts) > 1:
        yield "two finished attempts"
    for first, second in pairwise(attempts):
        if second.claimed and (first.finished is None or second.claimed < first.finished):
            yield f"attempt {second.number} began before attempt {first.number} had ended"
    if task_id in record.late:
        yield f"accepted after the attempt's end: {record.late[task_id]}"


def _overlaps(name: str, batch: Batch, fixture: Fixture) -> Iterator[str]:
    """Two attempts whose agents acted at the same time, as the task's own witness tells."""
    if not batch.exclusive:
        return
    spans: dict[str, list[float]] = defaultdict(list)
    for pid, at in works.witness(fixture.settings, name):
        spans[pid].append(at)
    ordered = sorted((min(beats), max(beats)) for beats in spans.values())
    for (_, first_end), (second_begin, _) in pairwise(ordered):
        if second_begin < first_end:
            yield f"two agents acted at once for {first_end - second_begin:.1f} s"


def _story(attempts: list[Any]) -> str:
    return ", ".join(f"{a.number}:{a.state}/{a.end_reason}" for a in attempts) or "none"


def _strangers(fixture: Fixture, record: _Record) -> Iterator[str]:
    """Tasks that nobody submitted: a submission that was taken twice."""
    known = {task_id for batch in fixture.batches for task_id in batch.task_ids}
    if extra := len(set(record.tasks) - known):
        yield f"{extra} tasks exist that no accepted submission named"


def _promises(fixture: Fixture, record: _Record) -> Iterator[str]:
    for what, samples in fixture.watch.broken.items():
        yield f"{what} (in {samples} of {fixture.watch.samples} looks)"
    by_instance: dict[UUID, list[Any]] = defaultdict(list)
    for attempt in record.attempts:
        if attempt.instance_id is not None:
            by_instance[attempt.instance_id].append(attempt)
    twice = [i for i, own in by_instance.items() if own[0].mode == "ephemeral" and len(own) > 1]
    if twice:
        yield f"{len(twice)} ephemeral instances took more than one attempt"
    most = _most_at_once([a for a in record.attempts if a.mode == "ephemeral"])
    if most > fixture.settings.capacity():
        yield f"{most} ephemeral attempts at once; expected at most {fixture.settings.capacity()}"
    for instance_id, own in by_instance.items():
        at_once = _most_at_once(own, since="claimed")
        if own[0].mode == "persistent" and at_once > fixture.settings.persistent_slots:
            yield f"{at_once} attempts at once on instance {instance_id}"


def _most_at_once(attempts: list[Any], since: str = "dispatched") -> int:
    moments: list[tuple[float, int]] = []
    for attempt in attempts:
        begun = getattr(attempt, since)
        if begun is not None and attempt.finished is not None:
            moments += [(begun, 1), (attempt.finished, -1)]
    now = most = 0
    for _, change in sorted(moments):  # an end at the same moment comes first
        now += change
        most = max(most, now)
    return most


def _recovery(record: _Record, faults_at: list[float], found: Verdict) -> None:
    """From the fault that ended an attempt to the next attempt in a worker's hands."""
    for attempts in record.of_task.values():
        for first, second in pairwise(attempts):
            if first.finished is None or second.claimed is None:
                continue
            before = [at for at in faults_at if (first.claimed or first.dispatched) <= at <= first.finished]
            took_s = round(second.claimed - (before[-1] if before else first.finished), 3)
            found.recovery_s.append(took_s)
            if took_s > _SLOW_S:
                waited = (
                    f"{second.dispatched - first.finished:.1f} s for a slot, {second.claimed - second.dispatched:.1f}"
                )
                found.notes.append(
                    f"slow: a {second.mode} task's attempt {second.number} began {took_s:.0f} s after attempt"
                    f" {first.number} ({first.state}) was struck; it waited {waited} s for a worker"
                )
    if found.recovery_s:
        ordered = sorted(found.recovery_s)
        found.recovery_p50_s = round(statistics.median(ordered), 2)
        found.recovery_p99_s = round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 2)
