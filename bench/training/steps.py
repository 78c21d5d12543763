"""Part `steps`: steps of training an hour at equal capacity, in the modes `sync`, `periodic` and `async`.

A step is 64 groups of 16 rollouts. Instances are simulated; dispatcher, ledger, leases, sample maker, hand-out and the
bound on staleness are the product's, and the modes are what a trainer makes of them:

- `sync`: `max_staleness=0`; the trainer waits for all groups of a step, trains, publishes, commits.
- `periodic`: `max_staleness=0`; the trainer takes each group when it is complete and trains on it at once; versions
  change after the last alone. That asks for a trainer that can: one pass, or gradients that are summed up.
- `async`: `max_staleness=1`; as `sync`, and meanwhile the groups of the next step run.

The trainer is a process that sleeps: `train_s` for a step, in proportion for a part of one. A second stands for about a
minute. With every version the simulation's dice are thrown anew and its attempts leave calls of that version, so that
staleness is what it would be. The first step fills the pipe and is not counted. The adverse workload has a trainer that
takes a tenth of a step: there is little to overlap.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from statistics import median
from uuid import UUID

from app.artifacts import open_store
from app.client import MegaFlow
from app.ledger import accept, experience
from app.ledger.accept import Accepted, NewRun
from app.ledger.experience import ExperienceRun, Lease
from app.models.kinds import Purpose
from app.models.simulation import Simulation
from bench.control_record import Part
from bench.control_system import Say, System, running
from bench.record import Row, row
from bench.training import recorded, workload
from bench.training.rollouts import SETTINGS, specs

GOAL = 1.35
MODES = ("sync", "periodic", "async")
_CONSUMER, _LEASE_S, _LOOK_S = "bench", 600.0, 0.05
_STEP_S = 240.0
"""Longer than any step."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    seeds: int = 3
    groups: int = 64
    replicas: int = 16
    slots: int = 256
    median_s: float = 2.4
    steps: int = 3
    """With the first, which is not counted."""
    train_s: float = 8.5
    """About a third of a step in the mode `sync`."""
    short_train_s: float = 2.2
    """Of the adverse workload: about a tenth."""


QUICK = Scale(seeds=1, groups=8, replicas=4, slots=16, median_s=0.5, steps=3, train_s=1.0, short_train_s=0.2)


@dataclass(frozen=True, slots=True)
class Training:
    """Some steps in one mode. `live_s`: when each version went live, in seconds since the submission."""

    mode: str
    seed: int
    train_s: float
    live_s: list[float]
    stale: int  # groups that were set aside
    groups: int  # trained on

    @property
    def per_hour(self) -> float:
        return 3600 * (len(self.live_s) - 1) / (self.live_s[-1] - self.live_s[0])


def measure(scale: Scale, say: Say) -> Part:
    """Run all modes for all seeds. Raises: MegaFlowError, RuntimeError: the stack did not do its work."""
    found: list[Training] = []
    sizes: dict[str, object] = {"persistent_instances": 8, "persistent_slots": scale.slots // 8}
    with running("constant:1", **sizes, **SETTINGS) as system:
        for train_s, seeds in ((scale.train_s, scale.seeds), (scale.short_train_s, 1)):
            for seed in range(seeds):
                for mode in MODES:
                    say(f"{mode}, seed {seed + 1}, {train_s:g} s of training in a step")
                    found.append(_Loop(system, scale, mode, seed, train_s).run())
    usual = [one for one in found if one.train_s == scale.train_s]
    adverse = [one for one in found if one.train_s != scale.train_s]
    rows = [*_rows(usual, "steps", GOAL), *_rows(adverse, "steps, adverse: short training", None)]
    return Part(rows, {"trainings": found, "scale": scale})


def _rows(found: Sequence[Training], at: str, goal: float | None) -> list[Row]:
    rows = []
    by_mode = {mode: [one for one in found if one.mode == mode] for mode in MODES}
    for mode, trainings in by_mode.items():
        rows.append(row(f"{at}: {mode}", median(one.per_hour for one in trainings), "steps/h"))
        if mode != "sync":
            pairs = zip(trainings, by_mode["sync"], strict=True)
            ratio = median(one.per_hour / other.per_hour for one, other in pairs)
            rows.append(row(f"{at}: {mode} to sync", ratio, "x", goal=goal))
        busy = median(one.train_s * one.per_hour / 3600 for one in trainings)
        rows.append(row(f"{at}: {mode}: trainer at work", busy, "share of time"))
    stale = [one.stale / (one.stale + one.groups) for one in by_mode["async"]]
    rows.append(row(f"{at}: async: groups set aside as stale", median(stale), "share of groups"))
    return rows


class _Loop:
    """One training: a run with the groups of all steps, and two steps' more, so that the last has rivals, too."""

    def __init__(self, system: System, scale: Scale, mode: str, seed: int, train_s: float) -> None:
        self._system, self._scale, self._mode, self._seed, self._train_s = system, scale, mode, seed, train_s
        self._database = system.database
        self._store = open_store(system.stack.settings.artifacts())
        self._policy = f"{mode}-{seed}-{train_s:g}"
        self._run: UUID

    def run(self) -> Training:
        scale = self._scale
        self._system.until_pool_stands(8)
        self._publish(0)
        later = datetime.now(UTC) + timedelta(seconds=1.5)  # the trainer says first how much it takes at a time
        new = NewRun(
            specs((scale.steps + 2) * scale.groups, 3), scale.replicas, purpose=Purpose.TRAINING, available_at=later
        )
        accepted = accept.accept(self._database, new)
        self._run = accepted.run_id
        bound = 1 if self._mode == "async" else 0
        experience.open_run(self._database, ExperienceRun(self._run, self._policy, max_staleness=bound))
        self._lease(scale.groups)
        begun, live_s = time.monotonic(), []
        for step in range(1, scale.steps + 1):
            leases = self._as_they_come() if self._mode == "periodic" else self._all_together()
            self._publish(step)
            live_s.append(time.monotonic() - begun)
            for lease in leases:
                experience.commit(self._database, lease.id, f"v{step}")
        counts = experience.counts(self._database, self._run)
        self._end(accepted)
        return Training(self._mode, self._seed, self._train_s, live_s, counts.stale, counts.committed)

    def _all_together(self) -> list[Lease]:
        """Wait for a step's groups, then train on them."""
        groups = self._scale.groups
        until = time.monotonic() + _STEP_S
        while experience.counts(self._database, self._run).ready < groups:
            if time.monotonic() > until:
                raise RuntimeError(f"expected a step's groups, found {experience.counts(self._database, self._run)}")
            time.sleep(_LOOK_S)
        lease = self._lease(groups)
        if lease is None or len(lease.groups) < groups:  # some were too old; those that come are of this version
            return self._as_they_come([lease] if lease else [])
        self._train([lease])
        return [lease]

    def _as_they_come(self, leases: Sequence[Lease] = ()) -> list[Lease]:
        """Train on each group when it is there."""
        found = list(leases)
        until = time.monotonic() + _STEP_S
        self._train(found)
        while (missing := self._scale.groups - sum(len(lease.groups) for lease in found)) > 0:
            if (lease := self._lease(missing)) is not None:
                found.append(lease)
                self._train([lease])
            elif time.monotonic() > until:
                raise RuntimeError(f"expected {missing} more groups of a step within {_STEP_S:g} s")
            else:
                time.sleep(_LOOK_S)
        return found

    def _train(self, leases: Sequence[Lease]) -> None:
        time.sleep(self._train_s * sum(len(lease.groups) for lease in leases) / self._scale.groups)

    def _lease(self, groups: int) -> Lease | None:
        return experience.next_batch(self._database, self._run, _CONSUMER, groups=groups, lease_s=_LEASE_S)

    def _publish(self, number: int) -> None:
        """Have a version live, and what begins from here on answered by it."""
        version = f"v{number}"
        experience.publish(self._database, self._policy, version)
        experience.settle(self._database, self._policy, version)
        key = recorded.keep(self._store, f"bench/{self._policy}/{version}", recorded.SHORT, version)
        behaviour = Simulation.of(
            run_s=workload.load().run_s("plain", self._scale.median_s),
            seed=100 * self._seed + number,
            model_calls=(key,),
        )
        self._system.stack.provider().behave(behaviour)

    def _end(self, accepted: Accepted) -> None:
        with MegaFlow(self._system.stack.settings) as flow:
            flow.cancel(accepted.task_ids)
        self._system.until_ended(accepted, timeout_s=120)
