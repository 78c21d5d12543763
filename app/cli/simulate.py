"""Implements `megaflow simulate`: capacity planning with a real control plane and simulated instances."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from app.cli.orderly import ending_in_order
from app.cli.progress import wait
from app.cli.show import Json, as_json, console
from app.cli.tables import Table
from app.client import MegaFlow
from app.errors import LimitInvalid, OptionInvalid
from app.models.simulation import CHANCES, Simulation
from app.models.spec import AgentTask, Bundle, EnvironmentSpec, Limits, Mode, ScriptGoal
from app.scheduling.policy import DispatchOrder

_FAULTS = ", ".join(CHANCES)


def simulate(
    tasks: Annotated[int, typer.Option(min=1, help="Number of tasks.")] = 1000,
    mode: Annotated[Mode | None, typer.Option(help="ephemeral (default) or persistent.")] = None,
    capacity: Annotated[
        int | None, typer.Option(min=1, help="Attempts at once (200); for a trace: with --mode.")
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Persistent: attempts at once on one instance.")] = 4,
    run_s: Annotated[str, typer.Option(help="Seconds that an attempt takes, e.g. `lognormal:60,0.5`.")] = "constant:1",
    boot_s: Annotated[str, typer.Option(help="Seconds that an instance boots, e.g. `uniform:1,10`.")] = "constant:0",
    fault: Annotated[
        list[str] | None, typer.Option(metavar="NAME=CHANCE", help=f"May be repeated, each up to 1: {_FAULTS}.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    trace: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN", help="Use the tasks of this recorded run, in virtual time. May be repeated."),
    ] = None,
    policy: Annotated[
        DispatchOrder,
        typer.Option(help="Dispatch order for a trace, with --mode and --capacity (default: as recorded)."),
    ] = DispatchOrder.FAIR,
    timeout: Annotated[float | None, typer.Option(help="Seconds to wait at most.")] = None,
    json: Json = False,
) -> None:
    """Plan capacity: run synthetic tasks on simulated instances, through a separate real control plane.

    A private PostgreSQL, Redis and control worker are started, and removed afterwards. Time is real time: divide all
    durations by one factor to see a day in an hour. With --trace nothing is started: the durations are those of the
    record, and only the dispatch policy is run.
    """
    if trace:
        from app.cli import simulate_trace

        simulate_trace.replay(trace, simulate_trace.Variant(policy, mode, capacity, slots), json=json)
        return
    behaviour = Simulation.of(run_s=run_s, boot_s=boot_s, seed=seed, **_chances(fault or []))
    plan = SimulationPlan(tasks, mode or Mode.EPHEMERAL, capacity or 200, slots, behaviour, timeout)
    outcome = carry_out(plan)
    if json:
        as_json(outcome)
    else:
        _show(plan, outcome)


def _chances(given: list[str]) -> dict[str, str]:
    """Returns the faults by name. Raises: SpecInvalid."""
    chances = dict(one.partition("=")[::2] for one in given)
    if unknown := sorted(chances.keys() - set(CHANCES)):
        raise OptionInvalid(f"--fault: expected NAME=CHANCE, found {unknown[0]!r}; known: {_FAULTS}")
    return chances


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """Parameters of a simulation."""

    tasks: int
    mode: Mode
    capacity: int  # attempts at once
    slots: int  # attempts at once on one persistent instance
    behaviour: Simulation
    timeout_s: float | None = None

    def settings(self) -> dict[str, object]:
        """Returns the settings of the private stack. Raises: LimitInvalid: this capacity is not possible."""
        if self.mode is Mode.EPHEMERAL:
            return {"ephemeral_capacity": self.capacity, "persistent_instances": 0}
        if self.mode is not Mode.PERSISTENT:
            raise LimitInvalid(f"expected --mode ephemeral or persistent, found {self.mode}")
        if self.capacity % self.slots:
            whole = math.ceil(self.capacity / self.slots) * self.slots
            raise LimitInvalid(
                f"expected a capacity that is a multiple of the {self.slots} slots of an instance,"
                f" found {self.capacity}; try --capacity {whole} or other --slots"
            )
        return {"persistent_instances": self.capacity // self.slots, "persistent_slots": self.slots}


def carry_out(plan: SimulationPlan) -> dict[str, Any]:
    """Starts the private stack, runs the plan, and removes the stack again; returns the report.

    Raises: LimitInvalid; WaitTimeout; InstallationFailed and others: the stack did not start.
    """
    from app.simulation import report
    from app.stack.private import private_stack

    overrides = plan.settings()
    with (
        ending_in_order(),
        private_stack(overrides, simulation=plan.behaviour) as stack,
        MegaFlow(stack.settings) as flow,
    ):
        before = stack.usage()
        run = flow.enqueue_many(_synthetic(plan), agent="nop", mode=plan.mode, name="simulation")
        wait(flow, [run], timeout=plan.timeout_s)
        outcome = report.report(flow.database, plan.capacity)
        used = {
            name: {"cpu_s": round(now.cpu_s - before[name].cpu_s, 2), "memory_bytes": now.memory_bytes}
            for name, now in stack.usage().items()
        }
        return {**asdict(outcome), "capacity": plan.capacity, "simulation": stack.provider().counts(), "usage": used}


def _synthetic(plan: SimulationPlan) -> list[AgentTask]:
    """Returns tasks for simulated instances only: their image and tests do not exist, so no worker could run them."""
    longest_s = max(1800.0, 50 * plan.behaviour.run_s.mean_s)
    shared: dict[str, Any] = {
        "dataset": "synthetic",
        "description": "nothing: a simulated instance takes it",
        "environment": EnvironmentSpec(image="simulated"),
        "goal": ScriptGoal(tests=Bundle(sha256="0" * 64, size_bytes=0)),
        "limits": Limits(agent_timeout_s=longest_s),
    }
    return [AgentTask(name=f"simulated-{number:06}", **shared) for number in range(plan.tasks)]


def _show(plan: SimulationPlan, found: dict[str, Any]) -> None:
    table = Table("tasks", "graded", "not scored", "retries", "makespan s", "wait p50 s", "wait p99 s")
    numbers = (found["total"][key] for key in ("tasks", "graded", "not_scored", "retries"))
    spans = (found["total"][key] for key in ("makespan_s", "wait_p50_s", "wait_p99_s"))
    table.add_row(*map(str, numbers), *("-" if span is None else f"{span:.2f}" for span in spans))
    console.print(table)
    used = f"{found['utilisation']:.0%} of {plan.capacity} slots used, at most {found['peak']} at once"
    console.print(f"{found['throughput']:.1f} tasks/s; {used}")
    console.print(f"attempts: {_listed(found['attempt_ends'])}; instances: {_listed(found['instances'])}")
    cpu = ", ".join(f"{name} {cost['cpu_s']:.1f}" for name, cost in found["usage"].items())
    console.print(f"CPU seconds: {cpu}")


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
