"""Part 8, admission: one task per instance against many per host, as many as its pressure allows; real environments.

The agent of examples/agent works in containers, on scripts that a replay engine answers after as long as a
model would take: turns and answers are those of the committed programs, at 25 tokens a second. `alone`: a standing
instance with one slot, as ephemeral instances have. `together`: one with many slots, of which admission uses what the
host bears; `unbounded`: one that names no host, so that admission knows of no pressure. The same tasks run in all ways;
a run's time goes from the claim to the end of the teardown. How long any process on the machine waited for a CPU
meanwhile stands beside it.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from app.ledger import classes
from app.ledger.database import Database, sql
from app.models.outcome import Phase, TaskResult
from app.models.spec import AgentTask, Mode
from app.workers.host_care import PressureGauge
from bench import system
from bench.control_record import Part
from bench.environments import agent as scripted
from bench.environments.figures import Panel
from bench.gateway.crew import Say
from bench.gateway.programs import workload
from bench.gateway.programs.workload import Program, Turn
from bench.record import Row, row
from bench.system import System

TASK = "pallets__itsdangerous-1"
ALONE, TOGETHER, UNBOUNDED = "alone", "together", "unbounded"
GOAL_TIMES, GOAL_LONGER = 3.0, 1.1
ANSWER_TOKEN_S, CALL_S = 0.04, 1.0
_MODEL_MOST_S = 60.0
"""Programs that would take longer are left out, so that a batch takes minutes."""
_TIMEOUT_S = 900
_MANIFEST = Path(__file__).parents[2] / "examples" / "agent" / "agent.toml"
_AGENT, _DONE = "sketch", "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_PAUSE_S = 5.0
_CLASSES = {ALONE: ALONE, TOGETHER: "standard", UNBOUNDED: UNBOUNDED}


@dataclass(frozen=True, slots=True)
class Scale:
    rounds: int = 2
    programs: int = 4
    replicas: int = 8  # of each, but alone
    slots: int = 16


QUICK = Scale(rounds=1, programs=2, replicas=2)


@dataclass(frozen=True, slots=True)
class Batch:
    """Tasks that were submitted at once. `runs`: seconds of each, by program; `most`: attempts at once."""

    way: str
    wall_s: float
    runs: list[tuple[str, float]]
    most: int
    waited: float  # share of the time in which some process of the machine waited for a CPU

    @property
    def per_hour(self) -> float:
        return 3600 * len(self.runs) / self.wall_s


def measure(scale: Scale, say: Say) -> Part:
    """Raises: MegaFlowError, RuntimeError: no engine, no framework, or a task that was not submitted."""
    chosen = [one for one in workload.read(workload.SEEDS[0]) if _model_s(one) <= _MODEL_MOST_S][: scale.programs]
    with tempfile.TemporaryDirectory(prefix="mfb-") as folder:
        for number, program in enumerate(chosen):
            (Path(folder) / f"bench-{number}.yaml").write_text(yaml.safe_dump(_script(number, program)))
        given: dict[str, Any] = {"replay_scripts": (Path(folder),), "agent_manifests": (_MANIFEST,)}
        with system.running(TASK, say, persistent_slots=scale.slots, **given) as running:
            found = _rounds(scale, running, len(chosen), say)
    shown = {one: [mean(b.per_hour for b in found if b.way == one)] for one in (ALONE, TOGETHER, UNBOUNDED)}
    panel = Panel("tasks per hour on one host", "1/h", shown)
    return Part(_rows(found), {"found": found, "scale": scale, "panels": [panel]})


def _model_s(program: Program) -> float:
    return sum(_delay_s(turn) for turn in program.turns) + CALL_S


def _delay_s(turn: Turn) -> float:
    return CALL_S + ANSWER_TOKEN_S * turn.answer


def _words(number: int) -> str:
    """The sentence by which the replay engine knows the conversation."""
    return f"Keep a diary of modules, as the admission benchmark's script says: number {number}."


def _script(number: int, program: Program) -> dict[str, Any]:
    turns: list[dict[str, Any]] = [
        {"thought": "On.", "command": command, "delay_s": round(_delay_s(turn), 2)}
        for command, turn in zip(scripted.script(len(program.turns)), program.turns, strict=True)
    ]
    return {
        "match": _words(number),
        "turns": [*turns, {"thought": "Done.", "command": f"echo {_DONE}", "delay_s": CALL_S}],
    }


def _task(task: AgentTask, number: int) -> AgentTask:
    limits = task.limits.model_copy(update={"max_steps": 100})
    return task.model_copy(update={"name": f"bench-{number}", "description": _words(number), "limits": limits})


def _rounds(scale: Scale, running: System, programs: int, say: Say) -> list[Batch]:
    tasks = [_task(running.task, number) for number in range(programs)]
    database = Database(running.settings.database(), pooled=False)
    for name, slots in ((ALONE, 1), (UNBOUNDED, scale.slots)):
        classes.set_class(database, name, pool_min=1, pool_max=1, pool_slots=slots)
    _batch(running, UNBOUNDED, tasks[:1], 1, say)  # so that its instance is there, and all is warm
    with database.begin() as connection:
        sql(connection, "UPDATE instances SET host = NULL WHERE resource_class = :name", {"name": UNBOUNDED})
    found = []
    for number in range(scale.rounds):
        for way in list(_CLASSES)[:: -1 if number % 2 else 1]:
            say(f"round {number + 1} of {scale.rounds}: {way}")
            found.append(_batch(running, way, tasks, 1 if way == ALONE else scale.replicas, say))
            time.sleep(_PAUSE_S)
    return found


def _batch(running: System, way: str, tasks: list[AgentTask], replicas: int, say: Say) -> Batch:
    begun, gauge = time.monotonic(), PressureGauge()
    run = running.flow.enqueue_many(
        tasks,
        agent=_AGENT,
        mode=Mode.PERSISTENT,
        model="replay",
        replicas=replicas,
        resource_class=_CLASSES[way],
    )
    results = [running.torn_down(result) for result in run.results(timeout=_TIMEOUT_S)]
    wall_s, waited = time.monotonic() - begun, gauge.read().cpu
    for result in results:
        if len(result.attempts) != 1 or result.end_reason is None or result.end_reason.value != "submitted":
            raise RuntimeError(f"expected a task that submits at once; found {result.end_reason}: {result.failure}")
    batch = Batch(way, wall_s, [(result.name, _seconds(result)) for result in results], _most_at_once(results), waited)
    say(f"{way}: {batch.per_hour:.0f} tasks an hour, {mean(s for _, s in batch.runs):.1f} s each, {batch.most} at once")
    return batch


def _seconds(result: TaskResult) -> float:
    phases = result.attempts[-1].phases
    return (phases[Phase.TORN_DOWN] - phases[Phase.CLAIMED]).total_seconds()


def _most_at_once(results: list[TaskResult]) -> int:
    steps = [
        (r.attempts[-1].phases[phase], n) for r in results for phase, n in ((Phase.CLAIMED, 1), (Phase.TORN_DOWN, -1))
    ]
    most = now = 0
    for _, step in sorted(steps):
        now += step
        most = max(most, now)
    return most


def _rows(found: list[Batch]) -> list[Row]:
    per_hour = {way: mean(b.per_hour for b in found if b.way == way) for way in (ALONE, TOGETHER, UNBOUNDED)}
    seconds = {way: _mean_run_s(found, way) for way in per_hour}
    rows: list[Row] = []
    for way in per_hour:
        rows.append(row(f"{way}: tasks per hour", per_hour[way], "1/h"))
        rows.append(row(f"{way}: mean run", seconds[way], "s"))
        rows.append(row(f"{way}: attempts at once, most", max(b.most for b in found if b.way == way), "attempts"))
        waited = mean(b.waited for b in found if b.way == way)
        rows.append(row(f"{way}: time in which some process of the machine waited for a CPU", waited, "share"))
    for way, goals in ((TOGETHER, (GOAL_TIMES, GOAL_LONGER)), (UNBOUNDED, (None, None))):
        rows.append(row(f"{way}: tasks per hour against alone", per_hour[way] / per_hour[ALONE], "x", goal=goals[0]))
        longer = seconds[way] / seconds[ALONE]
        rows.append(row(f"{way}: mean run against alone", longer, "x", goal=goals[1], better="less"))
    return rows


def _mean_run_s(found: list[Batch], way: str) -> float:
    """Of the programs' own means."""
    runs: defaultdict[str, list[float]] = defaultdict(list)
    for batch in found:
        for name, seconds in batch.runs if batch.way == way else ():
            runs[name].append(seconds)
    return mean(mean(own) for own in runs.values())
