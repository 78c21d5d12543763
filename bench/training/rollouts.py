"""Parts `waste` and `groups`: what infrastructure faults cost, and how long a group waits for its stragglers.

Steps of 64 groups of 16 rollouts, on simulated instances: dispatcher, broker, ledger, leases, retries, repairs, hedges
and the sample maker are the product's; only what an attempt does is drawn, from `workload.py`. A second stands for
about a minute. A graded attempt leaves the recorded calls of one short conversation, of which a sample is made.

`waste`: 5 % of the attempts break at a random moment of their time. A task has one attempt, so that each break is a
lost replica. Beside what MegaFlow spent stands what it costs to throw a group away with its first lost replica, worked
out on the same attempts: the first 16 of every group as they went, in rollouts, and in slots' time where the others are
stopped at once.

`groups`: 5 % of the durations are eight times as long. A group's time is from its first claim until it is complete,
with all 16 replicas, and with `quorum=14, hedge_after="p95"`. The adverse workload has 20 % of them: the 95th
percentile is then a straggler's own time, and more than two of 16 are slow in most groups.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from uuid import UUID

from app.artifacts import open_store
from app.ledger import accept, experience, training
from app.ledger.accept import NewRun
from app.ledger.experience import ExperienceRun
from app.models.groups import NO_RULES, GroupRules
from app.models.kinds import Purpose
from app.models.simulation import Simulation
from app.models.spec import Limits, TaskSpec
from bench.control_figures import quantile
from bench.control_record import Part
from bench.control_system import Say, System, a_spec, running
from bench.record import Row, row
from bench.training import recorded, workload

POLICY = "policy"
GOAL_WASTE, GOAL_SHORTER = 0.06, 2.0
FAULTS = 0.05
SHORTER = GroupRules(quorum=14, hedge_after="p95")
SETTINGS: dict[str, object] = {"sweep_s": 1.0, "retry_base_s": 0.1, "retry_cap_s": 1.0}
"""A tenth of what they are in earnest, as times here are shorter, too."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    seeds: int = 3
    groups: int = 64
    replicas: int = 16
    median_s: float = 4.0
    """Of a rollout that is no straggler."""
    slots: int = 512
    """For `waste`; for `groups`, as many as rollouts, so that nothing waits for a slot."""


QUICK = Scale(seeds=1, groups=8, replicas=16, median_s=1.0, slots=64)


@dataclass(frozen=True, slots=True)
class Try:
    """One attempt of a step. Times in seconds since the step's first claim."""

    group: str
    first: bool  # of the replicas that the group began with
    lost: bool
    superseded: bool
    claimed_s: float
    finished_s: float


@dataclass(frozen=True, slots=True)
class Step:
    """One step of simulated rollouts: its attempts, and the seconds that each group took."""

    workload: str
    rules: str
    seed: int
    attempts: list[Try]
    group_s: list[float]
    used: int  # attempts whose samples were handed out


def specs(groups: int, max_attempts: int) -> list[TaskSpec]:
    """A task for each group."""
    found = []
    for number in range(groups):
        spec = a_spec(number)
        task = spec.task.model_copy(update={"limits": Limits(max_attempts=max_attempts)})
        found.append(spec.model_copy(update={"task": task}))
    return found


def first_version(system: System) -> str:
    """Have a live version, and the calls of a conversation that it answered; their key."""
    experience.publish(system.database, POLICY, "v0")
    experience.settle(system.database, POLICY, "v0")
    return recorded.keep(open_store(system.stack.settings.artifacts()), "bench/v0", recorded.SHORT, "v0")


# --- Waste ----------------------------------------------------------------------------------------------------------


def measure_waste(scale: Scale, say: Say) -> Part:
    """Steps with faults. Raises: MegaFlowError, RuntimeError: the stack did not do its work."""
    found = []
    with _system(scale.slots) as system:
        key = first_version(system)
        for seed in range(scale.seeds):
            say(f"seed {seed + 1} of {scale.seeds}: {FAULTS:.0%} of the attempts break")
            found.append(_step(system, scale, "plain", NO_RULES, seed, key, infrastructure=FAULTS))
    waste = median(1 - step.used / len(step.attempts) for step in found)
    at = f"waste, {FAULTS:.0%} faults, groups of {scale.replicas}"
    rows = [
        row(f"{at}: repaired alone", waste, "share of rollouts", goal=GOAL_WASTE, better="less"),
        row(f"{at}: attempts that broke", median(_share_lost(step) for step in found), "share of attempts"),
        row(f"{at}: repaired alone, slots' time", median(_time_lost(step) for step in found), "share of time"),
        row(f"{at}: whole group lost", median(whole_group_loss(step)[0] for step in found), "share of rollouts"),
        row(f"{at}: whole group stopped", median(whole_group_loss(step)[1] for step in found), "share of time"),
        row("waste, groups of 8, worked out: whole group lost", 1 - (1 - FAULTS) ** 8, "share of rollouts"),
    ]
    return Part(rows, {"steps": [_short(step) for step in found], "scale": scale})


def _share_lost(step: Step) -> float:
    return sum(one.lost for one in step.attempts) / len(step.attempts)


def _time_lost(step: Step) -> float:
    spent = sum(one.finished_s - one.claimed_s for one in step.attempts)
    return sum(one.finished_s - one.claimed_s for one in step.attempts if one.lost) / spent


def whole_group_loss(step: Step) -> tuple[float, float]:
    """The shares of rollouts, and of slots' time with the rest stopped at once, if a lost replica took its group."""
    groups: dict[str, list[Try]] = defaultdict(list)
    for one in step.attempts:
        if one.first:
            groups[one.group].append(one)
    lost = rollouts = 0
    wasted_s = spent_s = 0.0
    for tries in groups.values():
        rollouts += len(tries)
        breaks = [one.finished_s for one in tries if one.lost]
        if breaks:
            lost += len(tries)
            used_s = sum(max(0.0, min(one.finished_s, min(breaks)) - one.claimed_s) for one in tries)
            wasted_s += used_s
        else:
            used_s = sum(one.finished_s - one.claimed_s for one in tries)
        spent_s += used_s
    return lost / rollouts, wasted_s / spent_s


# --- Groups ---------------------------------------------------------------------------------------------------------


def measure_groups(scale: Scale, say: Say) -> Part:
    """Steps with stragglers, with and without quorum and hedges. Raises: as `measure_waste`."""
    found: list[Step] = []
    with _system(scale.groups * scale.replicas) as system:
        key = first_version(system)
        for kind in ("stragglers", "many_stragglers"):
            for seed in range(scale.seeds if kind == "stragglers" else 1):
                for rules in (NO_RULES, SHORTER):
                    say(f"{kind}, seed {seed + 1}, {_name(rules)}")
                    found.append(_step(system, scale, kind, rules, seed, key))
    rows = [*_group_rows(found, "stragglers", "groups, 5 % stragglers", GOAL_SHORTER)]
    rows += _group_rows(found, "many_stragglers", "groups, adverse: 20 % stragglers", None)
    return Part(rows, {"steps": [_short(step) for step in found], "scale": scale})


def _group_rows(found: list[Step], kind: str, at: str, goal: float | None) -> list[Row]:
    """Of all seeds together: a p99 of 64 groups would be their slowest."""
    of = {
        rules: [step for step in found if step.workload == kind and step.rules == rules]
        for rules in (_name(NO_RULES), _name(SHORTER))
    }
    p99 = {rules: quantile([s for step in steps for s in step.group_s], 0.99) for rules, steps in of.items()}
    p50 = {rules: quantile([s for step in steps for s in step.group_s], 0.5) for rules, steps in of.items()}
    plain, shorter = p99
    superseded = [sum(one.superseded for one in step.attempts) / len(step.attempts) for step in of[shorter]]
    hedges = [sum(not one.first for one in step.attempts) / len(step.attempts) for step in of[shorter]]
    return [
        row(f"{at}: all 16: p50", p50[plain], "s"),
        row(f"{at}: all 16: p99", p99[plain], "s"),
        row(f"{at}: {shorter}: p50", p50[shorter], "s"),
        row(f"{at}: {shorter}: p99", p99[shorter], "s"),
        row(f"{at}: p99, shorter by", p99[plain] / p99[shorter], "x", goal=goal),
        row(f"{at}: {shorter}: superseded", median(superseded), "share of attempts"),
        row(f"{at}: {shorter}: hedges", median(hedges), "share of attempts"),
    ]


def _name(rules: GroupRules) -> str:
    return "all replicas" if rules is NO_RULES else f"quorum {rules.quorum}, hedges after {rules.hedge_after}"


# --- A step ---------------------------------------------------------------------------------------------------------


def _system(slots: int) -> AbstractContextManager[System]:
    return running("constant:1", persistent_instances=8, persistent_slots=-(-slots // 8), **SETTINGS)


def _step(
    system: System, scale: Scale, kind: str, rules: GroupRules, seed: int, key: str, *, infrastructure: float = 0.0
) -> Step:
    system.until_pool_stands(8)
    run_s = workload.load().run_s(kind, scale.median_s)
    chances = {"solved": 0.5, "infrastructure": infrastructure}
    system.stack.provider().behave(Simulation.of(run_s=run_s, seed=seed, model_calls=(key,), **chances))
    one_attempt = 1 if infrastructure else 3
    new = NewRun(specs(scale.groups, one_attempt), scale.replicas, purpose=Purpose.TRAINING, groups=rules)
    run_id = accept.accept(system.database, new).run_id
    experience.open_run(system.database, ExperienceRun(run_id, POLICY, quorum=rules.quorum))
    longest_s = 60 + 40 * scale.median_s
    system.until("complete groups", lambda: training.groups_going(system.database, run_id) == 0, longest_s, poll_s=0.5)
    live = (
        "SELECT count(*) FROM attempts a JOIN tasks t ON t.id = a.task_id WHERE t.run_id = %s AND a.finished_at IS NULL"
    )
    system.until("no attempt to run", lambda: system.number(live, [run_id]) == 0, 60, poll_s=0.5)
    lease = experience.next_batch(system.database, run_id, "bench", groups=scale.groups, lease_s=60)
    if lease is None or len(lease.groups) != scale.groups:
        raise RuntimeError(f"expected {scale.groups} complete groups, found {lease and len(lease.groups)}")
    tries, group_s = _tries(system, run_id)
    return Step(kind, _name(rules), seed, tries, group_s, len(lease.keys))


def _tries(system: System, run_id: UUID) -> tuple[list[Try], list[float]]:
    rows = system.connection.execute(
        "SELECT t.group_id, t.added_for, t.end_reason, a.claimed_at, a.finished_at, g.closed_at FROM tasks t"
        " JOIN attempts a ON a.task_id = t.id JOIN experience_groups g ON g.group_id = t.group_id WHERE t.run_id = %s",
        [run_id],
    ).fetchall()
    begun: datetime = min(row[3] for row in rows if row[3])
    first: dict[str, datetime] = {}
    closed: dict[str, datetime] = {}
    found = []
    for group, added_for, reason, claimed, finished, closed_at in rows:
        name = str(group)
        start = claimed or finished  # superseded before it was claimed
        first[name] = min(first.get(name, start), start)
        closed[name] = closed_at
        times = ((start - begun).total_seconds(), (finished - begun).total_seconds())
        lost = reason not in ("submitted", "superseded")
        found.append(Try(name, added_for is None, lost, reason == "superseded", *times))
    return found, [(closed[name] - first[name]).total_seconds() for name in closed]


def _short(step: Step) -> dict[str, object]:
    """What is kept of a step: its rules, and how long each group was open."""
    about = {"workload": step.workload, "rules": step.rules, "seed": step.seed, "used": step.used}
    return {**about, "group_s": step.group_s}
