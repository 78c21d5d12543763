"""Part 5, fairness: one user with 50,000 tasks in line, then nine come with 100 each.

Counted is what was started while all ten had work waiting, per weight: what ran before the nine came was no choice
between users. The same is done with the order set to first come first served, as in the paper, for as long.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import median

from app.ledger.accept import Accepted
from bench.control_figures import contested_until, jain, quantile
from bench.control_record import Part
from bench.control_system import Say, Span, System, running
from bench.record import Row, row

GOAL_JAIN = 0.95
BIG = "user-0"
ORDERS = ("fair", "fifo")


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    rounds: int = 2
    big: int = 50_000
    others: int = 9
    small: int = 100
    slots: int = 100
    run_s: str = "uniform:0.4,0.6"
    weights: tuple[tuple[str, float], ...] = (("user-1", 2.0), ("user-2", 0.5))
    """Of the last variant; everybody else has 1."""


QUICK = Scale(rounds=1, big=1_500, small=30, slots=50, weights=())


@dataclass(frozen=True, slots=True)
class Shares:
    """One round of one order. `started` and `finished`: tasks per user within `window_s`."""

    order: str
    round: int
    weights: dict[str, float]
    window_s: float
    started: dict[str, int]
    finished: dict[str, int]
    small_wait_p50_s: float | None
    """How long those of the nine's tasks that were claimed had waited; None: none was."""

    def index(self, counts: Mapping[str, int]) -> float:
        """Jain's index of the weighted shares."""
        return jain([count / self.weights.get(user, 1.0) for user, count in counts.items()])


def measure(scale: Scale, say: Say) -> Part:
    """Run all rounds. Raises: MegaFlowError, RuntimeError: the stack did not do its work."""
    found: list[Shares] = []
    for number in range(scale.rounds):
        window_s = 0.0
        for order, weights in _variants(scale):
            say(f"round {number + 1} of {scale.rounds}: order {order}{', weighted' if weights else ''}")
            shares = _contend(scale, order, weights, number, window_s)
            window_s = window_s or shares.window_s
            found.append(shares)
    return Part(_rows(found), {"shares": found, "scale": scale})


def _variants(scale: Scale) -> list[tuple[str, dict[str, float]]]:
    plain: list[tuple[str, dict[str, float]]] = [(order, {}) for order in ORDERS]
    return [*plain, ("fair", dict(scale.weights))] if scale.weights else plain


def _contend(scale: Scale, order: str, weights: dict[str, float], number: int, window_s: float) -> Shares:
    sizes: dict[str, object] = {"persistent_instances": 5, "persistent_slots": scale.slots // 5}
    with running(scale.run_s, dispatch_order=order, **sizes) as system:
        system.until_pool_stands(5)
        for user, weight in weights.items():
            system.connection.execute("INSERT INTO quotas (user_name, weight) VALUES (%s, %s)", [user, weight])
        big = system.submit(scale.big, user=BIG)
        system.until("the first user to have every slot", lambda: _running(system, big) >= 0.9 * scale.slots, 60)
        time.sleep(1.0)
        small = [system.submit(scale.small, user=f"user-{n}") for n in range(1, scale.others + 1)]
        return _observe(system, scale, order, weights, number, window_s, [big, *small])


def _running(system: System, run: Accepted) -> int:
    return system.count("running", run.run_id)


def _observe(
    system: System,
    scale: Scale,
    order: str,
    weights: dict[str, float],
    number: int,
    window_s: float,
    runs: list[Accepted],
) -> Shares:
    """Until somebody has started everything, or, where the nine start nothing, for as long as the fair order took."""
    small = [run.run_id for run in runs[1:]]
    give_up = time.monotonic() + (window_s + 3.0 if window_s and order != "fair" else 120.0)
    while time.monotonic() < give_up and system.count("pending", *small) > 0:
        time.sleep(0.2)
    spans = system.spans(*(run.run_id for run in runs))
    since = max(span.accepted for span in spans)
    until = since + timedelta(seconds=window_s) if order != "fair" else _contested_until(scale, spans)
    return Shares(
        order,
        number,
        weights,
        (until - since).total_seconds(),
        _counted(spans, [span.claimed for span in spans], since, until),
        _counted(spans, [span.finished for span in spans], since, until),
        _wait_p50_s(spans),
    )


def _contested_until(scale: Scale, spans: list[Span]) -> datetime:
    starts: defaultdict[str, list[datetime]] = defaultdict(list)
    for span in spans:
        if span.claimed is not None:
            starts[span.user].append(span.claimed)
    total = {span.user: scale.big if span.user == BIG else scale.small for span in spans}
    found = contested_until(starts, total)
    if found is None:
        raise RuntimeError("expected a user to have started everything, found that nobody had")
    return found


def _counted(spans: list[Span], times: list[datetime | None], since: datetime, until: datetime) -> dict[str, int]:
    counts = dict.fromkeys(sorted({span.user for span in spans}), 0)
    for span, moment in zip(spans, times, strict=True):
        if moment is not None and since <= moment <= until:
            counts[span.user] += 1
    return counts


def _wait_p50_s(spans: list[Span]) -> float | None:
    waited = [span.claim_s for span in spans if span.user != BIG and span.claimed is not None]
    return quantile(waited, 0.5) if waited else None


def _rows(found: list[Shares]) -> list[Row]:
    rows = []
    for order, weighted in dict.fromkeys((shares.order, bool(shares.weights)) for shares in found):
        rounds = [shares for shares in found if (shares.order, bool(shares.weights)) == (order, weighted)]
        at = f"fairness, order {order}{', weights 2 and 0.5 among them' if weighted else ''}"
        goal = GOAL_JAIN if order == "fair" else None
        started = median(shares.index(shares.started) for shares in rounds)
        rows.append(row(f"{at}: Jain index, started while all ten wait", started, "", goal=goal))
        finished = median(shares.index(shares.finished) for shares in rounds)
        rows.append(row(f"{at}: Jain index, finished meanwhile (also what ran before)", finished, ""))
        waits_s = [shares.small_wait_p50_s for shares in rounds if shares.small_wait_p50_s is not None]
        if waits_s:
            rows.append(row(f"{at}: the nine's wait p50", median(waits_s), "s"))
    return rows
