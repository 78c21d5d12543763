"""The main job measured: tasks per minute in both modes, and what a task costs beyond its bare commands.

    python -m bench.main        (about five minutes; writes results/main.json, main.samples.json and main.png)

One demo task is done over and over by `oracle`, so that agent and tests are the same few commands every time. Ours and
the bare variants take turns in every round, in a changing order; ratios of one run are what to trust on a busy machine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from app.errors import MegaFlowError
from app.models.spec import AgentTask, Mode
from app.stack import doctor, engine
from bench import plot, record, system, timing
from bench.bare import Bare
from bench.record import RESULTS, Row, row
from bench.system import WIDTH, System
from bench.timing import Batch

TASK = "pallets__itsdangerous-1"
ROUNDS = 3
ALONE, TOGETHER = 5, 16
"""Tasks per variant and round: one at a time, and `WIDTH` at a time."""
ENQUEUED = 20_000
ONE, TWO = "bare, one container", "bare, two containers"
OURS = (Mode.EPHEMERAL, Mode.PERSISTENT)

_HOLDS_A_SLOT = (
    "claimed → image_ready",
    "image_ready → environment_ready",
    "environment_ready → agent_started",
    "agent_started → agent_ended",
)

console = Console(stderr=True)


def main() -> int:
    """Measure, write, print; the exit code is 0 also when a goal was missed: the file says so."""
    rows: list[Row] = [row("processors busy with other work before the start", _foreign_load(), "share")]
    begun = time.monotonic()
    try:
        with _progress() as (say, advance), system.running(TASK, say) as ours:
            versions = {check.name: check.found for check in doctor.checks(ours.settings) if check.name in _SERVERS}
            batches = list(_rounds(ours, say, advance))
            rows += _figures(batches)
            rows += _enqueue(ours, say)
            rows += _bookkeeping(ours)
        rows.append(row("objects left in the engine after down", ours.left, "objects", goal=0, better="less"))
    except (MegaFlowError, RuntimeError) as error:
        console.print(f"bench: {error}", markup=False)
        return getattr(error, "exit_code", 1)
    rows += [row("load average, last minute, at the end", os.getloadavg()[0], "processes")]
    rows += [row("the benchmark itself", time.monotonic() - begun, "s"), record.machine(versions)]
    _keep(rows, batches)
    return 0


_SERVERS = ("postgresql", "redis", "engine")


def _rounds(ours: System, say: Callable[[str], None], advance: Callable[[], None]) -> Iterator[Batch]:
    bare = Bare(ours.task, ours.image, engine.engine_url(ours.settings))
    bare.one_container()  # the engine's and the disk's caches are warm for everybody
    for number in range(ROUNDS):
        for count, width in ((ALONE, 1), (TOGETHER, WIDTH)):
            variants = _variants(ours, bare, count, width)
            for offset in range(len(variants)):
                name, work = variants[(number + offset) % len(variants)]
                say(f"round {number + 1} of {ROUNDS}: {count} tasks, {width} at a time, {name}")
                yield work()
                advance()


def _variants(ours: System, bare: Bare, count: int, width: int) -> list[tuple[str, Callable[[], Batch]]]:
    do = ours.one_at_a_time if width == 1 else ours.together
    return [
        (ONE, lambda: timing.timed(ONE, bare.one_container, count, width)),
        *((mode.value, partial(do, mode, count)) for mode in OURS),
        (TWO, lambda: timing.timed(TWO, bare.two_containers, count, width)),
    ]


# --- Figures --------------------------------------------------------------------------------------------------------


def _figures(batches: list[Batch]) -> list[Row]:
    rows: list[Row] = []
    for width in (WIDTH, 1):
        at = f"{width} at a time"
        cost = {name: timing.slot_median_s(batches, name, width) for name in (*(m.value for m in OURS), ONE, TWO)}
        rows += [row(f"{name}, {at}: tasks per minute", 60 * width / cost[name], "1/min") for name in cost]
        rows += [row(f"{name}, {at}: time per task", cost[name], "s") for name in cost]
        for mode in OURS:
            for peer in (TWO, ONE):
                more_s, ratio = cost[mode.value] - cost[peer], cost[mode.value] / cost[peer]
                rows.append(row(f"{mode.value}, {at}: overhead per task over {peer}", more_s, "s"))
                rows.append(row(f"{mode.value}, {at}: time per task relative to {peer}", ratio, "x"))
            spans = timing.phase_medians_s(batches, mode.value, width)
            rows += [
                row(f"{mode.value}, {at}: {name}", spans[name], "s")
                for name in spans
                if name not in timing.not_ours(width)
            ]
            if width == 1:
                rows.append(row(f"{mode.value}, idle system: accepted to claimed, p50", spans["claim"], "s"))
                rows += _grading(mode.value, spans)
    return rows


def _grading(mode: str, spans: Mapping[str, float]) -> list[Row]:
    """What a verifier of its own costs at most, its tests included, and what its share of a slot would be."""
    from_end = list(spans)[list(spans).index("agent_ended → grading_queued") :]
    until = [name for name in from_end[: from_end.index("grading_started → graded") + 1] if name != "claim"]
    graded_s = sum(spans[name] for name in until)
    held_s = sum(spans[name] for name in _HOLDS_A_SLOT)
    share = (graded_s - spans[until[0]]) / (held_s + graded_s)
    return [
        row(f"{mode}, 1 at a time: agent's end to verdict, tests included", graded_s, "s", goal=1.0, better="less"),
        row(f"{mode}, 1 at a time: slot-seconds saved by grading apart", share, "share"),
    ]


def _enqueue(ours: System, say: Callable[[str], None]) -> list[Row]:
    say(f"enqueue: {ENQUEUED} tasks at once, three times, in a database of its own")
    different = [_renamed(ours.task, number) for number in range(ENQUEUED)]
    groups = different[: ENQUEUED // 16]
    with system.quiet_ledger(ours.settings) as flow:

        def many(tasks: list[AgentTask], replicas: int) -> float:
            begun = time.monotonic()
            run = flow.enqueue_many(tasks, agent="oracle", replicas=replicas)
            return len(run.handles) / (time.monotonic() - begun)

        def one(task: AgentTask) -> float:
            begun = time.monotonic()
            flow.enqueue(task, agent="oracle")
            return time.monotonic() - begun

        one(ours.task)
        apart = median(many(different, 1) for _ in range(3))
        grouped = median(many(groups, 16) for _ in range(3))
        single = median(one(task) for task in different[:200])
    return [
        row(f"enqueue_many: {ENQUEUED} different tasks", apart, "rows/s"),
        row(f"enqueue_many: {len(groups)} tasks of 16 replicas", grouped, "rows/s"),
        row("enqueue: one task, p50", single * 1000, "ms"),
    ]


def _renamed(task: AgentTask, number: int) -> AgentTask:
    return task.model_copy(update={"name": f"{task.name}-{number}"})


def _bookkeeping(ours: System) -> list[Row]:
    """What the issue wants of every ephemeral task: an instance of its own, and gone afterwards."""
    return [
        row("oracle tasks with reward 1", ours.solved / ours.tasks, "share", goal=1.0),
        row("instances made per ephemeral task", ours.instances / ours.ephemeral_tasks, "instances", goal=1.0),
        row("ephemeral instances left at the end", ours.live_instances(), "instances", goal=0, better="less"),
    ]


def _foreign_load() -> float:
    return psutil.cpu_percent(interval=3.0) / 100


# --- Output ---------------------------------------------------------------------------------------------------------


@contextmanager
def _progress() -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """Two functions: say what is done now, and go one step on."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        line = bar.add_task("starting", total=ROUNDS * 2 * (len(OURS) + 2))
        yield lambda text: bar.update(line, description=text[:90]), lambda: bar.advance(line)


def _keep(rows: list[Row], batches: list[Batch]) -> None:
    path = record.write("main", rows)
    lines = ",\n".join(json.dumps(asdict(batch)) for batch in batches)
    (RESULTS / "main.samples.json").write_text(f"[\n{lines}\n]\n")
    plot.main(batches, RESULTS / "main.png")
    table = Table("metric", "value", "unit", "goal", "holds", header_style="bold", pad_edge=False)
    for item in rows:
        if item.metric != "machine":
            table.add_row(item.metric, f"{item.value:g}", item.unit, _text(item.goal), _text(item.holds))
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    console.print(f"written: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def _text(value: float | bool | None) -> str:
    return "-" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
