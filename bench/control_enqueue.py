"""Part 1, enqueue: how fast tasks are accepted for good, beside Celery on the same Redis and procrastinate on the
same PostgreSQL.

Every variant works on what it finds empty: a database of its own for each round. The order changes from round to round,
and a ratio is taken within its round. Peers carry what stands in for our task: a name (beside our replicas, which share
a spec), or as many bytes as a spec of ours has (beside our different tasks).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

from app.client import MegaFlow
from app.ledger import accept
from app.ledger.accept import NewRun
from app.ledger.database import Database
from app.settings import Settings
from bench.control_figures import median_ratio, quantile
from bench.control_record import Part
from bench.control_system import Say, Servers, a_spec, a_task, servers
from bench.peers import venv
from bench.record import Row, row

GOAL_BULK_PER_S = 40_000.0
GOAL_SINGLE_P50_S = 0.003
REPLICAS, DIFFERENT, CLIENT, SINGLE = "same spec", "all different", "all different, by enqueue_many", "one by one"
CELERY, PROCRASTINATE = "celery", "procrastinate"


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    rounds: int = 5
    count: int = 50_000
    """Of ours in bulk: one call, one transaction."""
    peer_count: int = 20_000
    singles: int = 1_000


QUICK = Scale(rounds=1, count=10_000, peer_count=2_000, singles=50)


@dataclass(frozen=True, slots=True)
class Sample:
    """One variant in one round. `took_s`: p50 and p99 of the single calls, where there were any."""

    variant: str
    round: int
    per_s: float
    took_s: tuple[float, float] | None = None


def measure(scale: Scale, say: Say) -> Part:
    """Run all rounds. Raises: RuntimeError: a peer could not be installed or run."""
    say("the peers' environment")
    venv.python()
    samples: list[Sample] = []
    versions: dict[str, str] = {}
    with servers() as ours:
        durable = ours.durability()
        variants = _variants(ours, scale, versions)
        for number in range(scale.rounds):
            for offset in range(len(variants)):
                name, work = variants[(number + offset) % len(variants)]
                say(f"round {number + 1} of {scale.rounds}: {name}")
                samples += [Sample(variant, number, per_s, _ends(took)) for variant, per_s, took in work()]
    return Part(_rows(samples), {"samples": samples, "scale": scale}, {**durable, **versions})


def _ends(took_s: list[float]) -> tuple[float, float] | None:
    return (quantile(took_s, 0.5), quantile(took_s, 0.99)) if took_s else None


Found = list[tuple[str, float, list[float]]]
"""Variant, tasks per second, seconds of each single call."""


def _variants(ours: Servers, scale: Scale, versions: dict[str, str]) -> list[tuple[str, Callable[[], Found]]]:
    body_bytes = len(a_spec(0).model_dump_json())
    peers = [(CELERY, _celery), (PROCRASTINATE, _procrastinate)]
    return [
        (REPLICAS, partial(_bulk, ours, REPLICAS, scale.count)),
        (DIFFERENT, partial(_bulk, ours, DIFFERENT, scale.count)),
        *((name, partial(peer, ours, scale, versions, 0)) for name, peer in peers),
        (CLIENT, partial(_client, ours, scale.count)),
        (SINGLE, partial(_single, ours, scale.singles)),
        *((f"{name}, body", partial(peer, ours, scale, versions, body_bytes)) for name, peer in peers),
    ]


# --- Ours -----------------------------------------------------------------------------------------------------------


def _bulk(ours: Servers, variant: str, count: int) -> Found:
    """The ledger's `accept`, in one transaction, of specs that the producer has already."""
    new = (
        NewRun(specs=[a_spec(0)], replicas=count)
        if variant == REPLICAS
        else NewRun(specs=[a_spec(number) for number in range(count)])
    )
    with ours.fresh_database() as url:
        database = Database(url)
        _warm(database)
        begun = time.perf_counter()
        accepted = accept.accept(database, new)
        took = time.perf_counter() - begun
        database.close()
    assert len(accepted.task_ids) == count
    return [(variant, count / took, [])]


def _client(ours: Servers, count: int) -> Found:
    """The Python API, with everything that it does: checks, specs, handles."""
    tasks = [a_task(number) for number in range(count)]
    with ours.fresh_database() as url, MegaFlow(_settings(ours, url)) as flow:
        _warm(flow.database)
        begun = time.perf_counter()
        run = flow.enqueue_many(tasks, agent="nop")
        took = time.perf_counter() - begun
    assert len(run.handles) == count
    return [(CLIENT, count / took, [])]


def _single(ours: Servers, count: int) -> Found:
    tasks = [a_task(number) for number in range(count)]
    took: list[float] = []
    with ours.fresh_database() as url, MegaFlow(_settings(ours, url)) as flow:
        _warm(flow.database)
        for task in tasks:
            at = time.perf_counter()
            flow.enqueue(task, agent="nop")
            took.append(time.perf_counter() - at)
    return [(SINGLE, count / sum(took), took)]


def _warm(database: Database) -> None:
    """Connected, and every statement seen once: peers are warmed by a task, too."""
    accept.accept(database, NewRun(specs=[a_spec(999_999_999)]))


def _settings(ours: Servers, url: str) -> Settings:
    return Settings(home=ours.stack.settings.home, installation=ours.stack.settings.installation, database_url=url)


# --- Peers ----------------------------------------------------------------------------------------------------------


def _celery(ours: Servers, scale: Scale, versions: dict[str, str], body_bytes: int) -> Found:
    return _peer(CELERY, ("--broker", ours.stack.settings.broker()), scale, versions, body_bytes)


def _procrastinate(ours: Servers, scale: Scale, versions: dict[str, str], body_bytes: int) -> Found:
    with ours.fresh_database(migrated=False) as url:
        return _peer(PROCRASTINATE, ("--database", url), scale, versions, body_bytes)


def _peer(name: str, where: tuple[str, str], scale: Scale, versions: dict[str, str], body_bytes: int) -> Found:
    counts = ("--count", str(scale.peer_count), "--singles", str(scale.singles), "--body-bytes", str(body_bytes))
    found = venv.measure(f"{name}_enqueue", *where, *counts)
    figures = {key: found.pop(key) for key in ("one_by_one", "took_s", "bulk")}
    versions.update({f"peer_{key}": str(value) for key, value in found.items()})
    label = _label(name, body_bytes > 0)
    return [
        (f"{label}, {SINGLE}", figures["one_by_one"], figures["took_s"]),
        (f"{label}, bulk", figures["bulk"], []),
    ]


def _label(name: str, body: bool) -> str:
    return f"{name}, with a body" if body else name


# --- Figures --------------------------------------------------------------------------------------------------------


def _rows(samples: list[Sample]) -> list[Row]:
    def rates(variant: str) -> list[float]:
        return [sample.per_s for sample in sorted(samples, key=lambda s: s.round) if sample.variant == variant]

    goals = {REPLICAS: GOAL_BULK_PER_S, DIFFERENT: GOAL_BULK_PER_S}
    found = list(dict.fromkeys(sample.variant for sample in samples))
    rows = [row(f"enqueue, {name}", median(rates(name)), "tasks/s", goal=goals.get(name)) for name in sorted(found)]
    for name in sorted({sample.variant for sample in samples if sample.took_s}):
        p50s, p99s = zip(
            *(sample.took_s for sample in samples if sample.variant == name and sample.took_s), strict=True
        )
        goal = GOAL_SINGLE_P50_S * 1000 if name == SINGLE else None
        rows.append(row(f"enqueue, {name}: p50", median(p50s) * 1000, "ms", goal=goal, better="less"))
        rows.append(row(f"enqueue, {name}: p99", median(p99s) * 1000, "ms"))
    for peer in (CELERY, PROCRASTINATE):
        for mine, theirs in (
            (REPLICAS, f"{peer}, bulk"),
            (DIFFERENT, f"{_label(peer, True)}, bulk"),
            (CLIENT, f"{_label(peer, True)}, bulk"),
            (SINGLE, f"{_label(peer, True)}, {SINGLE}"),
        ):
            rows.append(row(f"enqueue: {mine} to {theirs}", median_ratio(rates(mine), rates(theirs)), "x"))
    return rows
