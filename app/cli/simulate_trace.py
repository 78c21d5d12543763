"""Implements `megaflow simulate --trace RUN`: a recorded run under another policy or capacity, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.cli.show import as_json, console
from app.cli.tables import Table
from app.client import MegaFlow
from app.errors import LimitInvalid
from app.models.spec import Mode
from app.scheduling.policy import DispatchOrder
from app.simulation import trace, virtual
from app.simulation.trace import Trace
from app.simulation.virtual import VirtualFleet, VirtualOutcome


@dataclass(frozen=True, slots=True)
class Variant:
    """Differences from the record. None: as recorded."""

    order: DispatchOrder = DispatchOrder.FAIR
    mode: Mode | None = None
    capacity: int | None = None  # attempts at once
    slots: int = 4  # attempts at once on a standing instance


def replay(runs: Sequence[str], variant: Variant, *, json: bool) -> None:
    """Prints how long the recorded runs would have taken. Raises: UnknownName, SpecInvalid, LimitInvalid."""
    with MegaFlow() as flow:
        recorded = trace.read(flow.database, [flow.installation.find_run(run) for run in runs])
    outcome = predicted(recorded, variant)
    figures = {
        "tasks": len(recorded.tasks),
        "recorded": {"makespan_s": recorded.makespan_s, "peak": recorded.peak, "start_s": recorded.start_s},
        "predicted": _figures(outcome),
    }
    if json:
        as_json(figures)
    else:
        _show(recorded, outcome)


def predicted(recorded: Trace, variant: Variant) -> VirtualOutcome:
    """Runs the recorded tasks under the variant. Raises: LimitInvalid: it has no capacity for them."""
    fleet = _fleet(recorded, variant)
    tasks = recorded.tasks
    if variant.mode is not None:
        tasks = [replace(task, mode=variant.mode) for task in tasks]
    try:
        return virtual.run(tasks, fleet)
    except ValueError as error:
        raise LimitInvalid(str(error)) from error


def _fleet(recorded: Trace, variant: Variant) -> VirtualFleet:
    peak, given = recorded.peak, variant.capacity
    if given is not None and variant.mode not in (Mode.EPHEMERAL, Mode.PERSISTENT):
        raise LimitInvalid(
            "expected --mode ephemeral or persistent with --capacity, which is of one mode; found neither"
        )
    if given is not None and given % variant.slots and variant.mode is Mode.PERSISTENT:
        raise LimitInvalid(
            f"expected a capacity that is a multiple of the {variant.slots} slots of an instance, found {given}"
        )
    pooled = 0 if variant.mode is Mode.EPHEMERAL else peak.get(Mode.PERSISTENT, 0)
    alone = 0 if variant.mode is Mode.PERSISTENT else given or peak.get(Mode.EPHEMERAL, 0)
    if variant.mode is Mode.PERSISTENT:
        pooled = given or pooled or sum(peak.values())
    elif variant.mode is Mode.EPHEMERAL:
        alone = alone or sum(peak.values())
    slots = min(variant.slots, pooled) or variant.slots
    return VirtualFleet(
        ephemeral=alone,
        pool=-(-pooled // slots),
        slots=slots,
        boot_s=recorded.start_s.get(Mode.EPHEMERAL, 0.0),
        claim_s=recorded.start_s.get(Mode.PERSISTENT, 0.0),
        order=variant.order,
    )


def _figures(found: VirtualOutcome) -> dict[str, Any]:
    return {"makespan_s": found.makespan_s, "p50_s": found.latency_s(0.5), "p95_s": found.latency_s(0.95)}


def _show(recorded: Trace, found: VirtualOutcome) -> None:
    table = Table("", "tasks", "makespan s", "task p50 s", "task p95 s")
    table.add_row("recorded", str(len(recorded.tasks)), f"{recorded.makespan_s:.1f}", "-", "-")
    table.add_row("predicted", str(len(found.ends)), *(f"{seconds:.1f}" for seconds in _figures(found).values()))
    console.print(table)
    if Mode.EPHEMERAL not in recorded.peak:
        console.print("no task of the record had an instance of its own: a boot is taken for nothing")
