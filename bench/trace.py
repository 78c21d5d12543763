"""Recorded runs again: does `megaflow simulate --trace` say what another policy or capacity would have taken?

    python -m bench.trace             (eleven minutes; writes results/trace.json)
    python -m bench.trace --quick     (few tasks, short; kept nowhere)
    python -m bench.trace --simulated (the same on simulated instances, which a busy machine does not slow down)

The demo dataset with the agent `oracle`, in environments of the kind `local` and on instances of the kind `process`.
Each task thinks for half a minute first, as an agent does that waits for its model: a `sleep` in its environment's
set-up, of another length for each task. What tasks do to each other on a busy host is not predicted. One run is
recorded; five others, in other modes and capacities, are predicted from it and then run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import LiteralString
from uuid import UUID

import psutil

from app import evaluation
from app.cli.simulate_trace import Variant, predicted
from app.errors import MegaFlowError
from app.ledger import classes
from app.ledger.database import Database
from app.models.simulation import Simulation
from app.models.spec import AgentTask, EnvironmentKind, Mode
from app.simulation import trace
from bench import control_record, control_system, system
from bench.control_record import Part
from bench.record import RESULTS, Row, row
from bench.system import System

TASK = "pallets__itsdangerous-1"
RECORDED = Variant(mode=Mode.EPHEMERAL, capacity=4)
VARIANTS = (
    Variant(mode=Mode.EPHEMERAL, capacity=2),
    Variant(mode=Mode.EPHEMERAL, capacity=3),
    Variant(mode=Mode.PERSISTENT, capacity=4, slots=4),
    Variant(mode=Mode.EPHEMERAL, capacity=6),
    Variant(mode=Mode.PERSISTENT, capacity=8, slots=8),
)
GOAL_ERROR, GOAL_RANKS = 0.10, 4
_TASKS, _LEAST_S, _STEP_S = 12, 20, 7
_SIMULATED = 24
_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Prediction:
    """One variant: seconds from the first acceptance to the last end, as predicted and as it was."""

    variant: str
    predicted_s: float
    real_s: float

    @property
    def error(self) -> float:
        return abs(self.predicted_s / self.real_s - 1)


def measure(*, quick: bool = False) -> Part:
    """Record, predict, run. Raises: MegaFlowError, RuntimeError: no engine, or a task that was not solved."""
    with system.running(TASK, _say, pool_cooldown_s=1.0) as ours:
        tasks = _thinking(ours, 4 if quick else _TASKS, 1 if quick else _LEAST_S)
        _run(ours, [_plain(task) for task in tasks], RECORDED, "warm")  # images are built, code is read
        _run(ours, tasks, RECORDED, "record")
        recorded = trace.read(ours.flow.database, [_run(ours, tasks, RECORDED, "trace")])
        found = []
        for number, variant in enumerate(VARIANTS):
            expected = predicted(recorded, variant)
            run_id = _run(ours, tasks, variant, f"variant-{number}")
            real = trace.read(ours.flow.database, [run_id])
            found.append(Prediction(_name(variant), expected.makespan_s, real.makespan_s))
            _say(f"{found[-1]}")
    return Part(_rows(found, "trace"), {"found": found, "recorded": asdict(recorded)["start_s"], "tasks": len(tasks)})


def measure_simulated() -> Part:
    """The same with simulated attempts, as many and as long: the policy is judged alone. Raises: as `measure`."""
    with control_system.running("constant:1", persistent_instances=0, ephemeral_capacity=1) as system:
        recorded = trace.read(system.database, [_run_simulated(system, RECORDED)])
        found = []
        for variant in VARIANTS:
            expected = predicted(recorded, variant)
            real = trace.read(system.database, [_run_simulated(system, variant)])
            found.append(Prediction(_name(variant), expected.makespan_s, real.makespan_s))
            _say(f"{found[-1]}")
    return Part(_rows(found, "trace, simulated"), {"found": found, "tasks": _SIMULATED})


def _run_simulated(system: control_system.System, variant: Variant) -> UUID:
    _resize(system.database, variant)
    system.stack.provider().behave(Simulation.of(run_s="lognormal:10,0.4", boot_s="constant:3", seed=7))
    if variant.mode is Mode.PERSISTENT:
        query: LiteralString = (
            "SELECT count(*) FROM instances WHERE mode = 'persistent' AND state = 'ready' AND slots = %s"
        )
        system.until("the pool", lambda: system.number(query, [variant.slots]) == 1, 60)
    assert variant.mode is not None
    run = system.submit(_SIMULATED, mode=variant.mode)
    system.until_ended(run, _TIMEOUT_S)
    return run.run_id


def ranks_right(found: Sequence[Prediction]) -> int:
    """How many variants have the place by their predicted time that they have by their real one."""
    by_predicted = sorted(found, key=lambda one: one.predicted_s)
    by_real = sorted(found, key=lambda one: one.real_s)
    return sum(one is other for one, other in zip(by_predicted, by_real, strict=True))


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _name(variant: Variant) -> str:
    assert variant.mode is not None
    return f"{variant.mode.value}, {variant.capacity} at once"


def _thinking(ours: System, count: int, least_s: int) -> list[AgentTask]:
    """Of the demo's tasks with one container, over and over, each with a time of its own."""
    known = evaluation.demo_tasks(ours.settings, EnvironmentKind.LOCAL)
    found = []
    for number in range(count):
        task = known[number % len(known)]
        think_s = least_s + number * 3 % 4 * _STEP_S * least_s // _LEAST_S
        environment = task.environment.model_copy(update={"setup": (*task.environment.setup, f"sleep {think_s}")})
        found.append(task.model_copy(update={"name": f"{task.name}-{number}", "environment": environment}))
    return found


def _plain(task: AgentTask) -> AgentTask:
    setup = task.environment.setup[:-1]
    return task.model_copy(update={"environment": task.environment.model_copy(update={"setup": setup})})


def _apart(task: AgentTask, run: str) -> AgentTask:
    """The same with a set-up that no other run has: what one has kept must not help another."""
    setup = (*task.environment.setup, f": {run} {task.name}")
    return task.model_copy(update={"environment": task.environment.model_copy(update={"setup": setup})})


def _run(ours: System, tasks: Sequence[AgentTask], variant: Variant, name: str) -> UUID:
    """Run all under the variant and wait until nothing is left of it; the run's id."""
    _until_pool(ours, _resize(ours.flow.database, variant), variant.slots)
    assert variant.mode is not None
    run = ours.flow.enqueue_many([_apart(task, name) for task in tasks], agent="oracle", mode=variant.mode, name=name)
    wrong = [result.name for result in run.results(timeout=_TIMEOUT_S) if result.reward != 1.0]
    if wrong:
        raise RuntimeError(f"expected reward 1 of every task; found others: {', '.join(wrong)}")
    ours.live_instances()
    return run.id


def _resize(database: Database, variant: Variant) -> int:
    """Give the class the variant's capacity; how many standing instances it then has."""
    ephemeral = variant.mode is Mode.EPHEMERAL
    pool = 0 if ephemeral else 1
    classes.set_class(
        database,
        classes.STANDARD,
        ephemeral_capacity=variant.capacity if ephemeral else 0,
        pool_min=pool,
        pool_max=pool,
        pool_slots=variant.slots,
        pool_cooldown_s=0.5,
    )
    return pool


def _until_pool(ours: System, instances: int, slots: int) -> None:
    """Until exactly so many standing instances are ready, with so many slots."""
    import psycopg

    give_up = time.monotonic() + 120
    query = (
        "SELECT count(*) FILTER (WHERE state = 'ready' AND slots = %s), count(*) FROM instances"
        " WHERE mode = 'persistent' AND state NOT IN ('terminated', 'failed')"
    )
    while time.monotonic() < give_up:
        with psycopg.connect(ours.settings.database(), autocommit=True) as connection:
            if connection.execute(query, [slots]).fetchone() == (instances, instances):
                return
        time.sleep(0.2)
    raise RuntimeError(f"expected {instances} standing instances of {slots} slots within 120 s")


def _rows(found: Sequence[Prediction], part: str) -> list[Row]:
    rows: list[Row] = []
    for one in found:
        at = f"{part}, {one.variant}"
        rows.append(row(f"{at}: makespan", one.real_s, "s"))
        rows.append(row(f"{at}: predicted", one.predicted_s, "s"))
        rows.append(row(f"{at}: off by", one.error, "share", goal=GOAL_ERROR, better="less"))
    rows.append(row(f"{part}: variants whose rank was right, of 5", ranks_right(found), "variants", goal=GOAL_RANKS))
    return rows


def main() -> int:
    """Measure, write, print. The exit code is 0 also when a goal was missed: the file says so."""
    parser = argparse.ArgumentParser(prog="python -m bench.trace", description="Recorded runs again.")
    parser.add_argument("--quick", action="store_true", help="does it work, rather than how well")
    parser.add_argument("--simulated", action="store_true", help="on simulated instances")
    given = parser.parse_args()
    busy, begun = psutil.cpu_percent(interval=1.0) / 100, time.monotonic()
    try:
        part = measure_simulated() if given.simulated else measure(quick=given.quick)
    except (MegaFlowError, RuntimeError) as error:
        _say(f"bench: {error}")
        return getattr(error, "exit_code", 1)
    if not given.quick:
        name, took_s = "simulated" if given.simulated else "trace", time.monotonic() - begun
        control_record.keep(RESULTS / "trace.json", name, part, busy=busy, took_s=took_s)
    for item in part.rows:
        sys.stdout.write(f"{item.metric}: {item.value:g} {item.unit}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
