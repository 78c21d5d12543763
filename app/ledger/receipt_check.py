"""Compares a receipt with the resources that exist. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from uuid import UUID

from app.ledger.receipts import ObjectKind, Receipt


@dataclass(frozen=True, slots=True)
class ListedResource:
    """A resource that the engine (or the host's disk) lists now; ids that its labels lack are None."""

    kind: ObjectKind
    id: str
    name: str
    role: str  # environment | instance | ''
    run_id: UUID | None
    attempt_id: UUID | None
    instance_id: UUID | None
    age_s: float


@dataclass(frozen=True, slots=True)
class Inventory:
    """Resources that exist. `silent`: listers that did not answer, so that their resources are unknown."""

    things: tuple[ListedResource, ...]
    instances: Mapping[str, frozenset[UUID]]  # by provider
    silent: tuple[str, ...] = ()  # engine, kubernetes, or a provider's name


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between a receipt and the existing resources. `left_behind`: a resource exists without a reason."""

    kind: str
    id: str
    what: str
    left_behind: bool


_YOUNG_S = 5.0
"""Age in seconds up to which a resource's line may not be written yet."""


def compare(receipt: Receipt, world: Inventory) -> list[Difference]:
    """Returns every difference between the receipt and the resources that exist."""
    return [*_objects_differ(receipt, world), *_unrecorded(receipt, world), *_instances_differ(receipt, world)]


def _objects_differ(receipt: Receipt, world: Inventory) -> list[Difference]:
    there = {thing.id for thing in world.things}
    differences = []
    for line in receipt.objects:
        seen = line.kind.lister not in world.silent
        what, left = None, False
        if line.destroyed_at is not None and line.engine_id in there:
            what, left = f"on record as removed by the {line.destroyed_by}, and still there", True
        elif line.destroyed_at is None and seen and line.engine_id not in there:
            what = "on record as standing, and not there"
        elif line.why is not None and not line.accounted:
            what, left = line.why, True
        if what is not None:
            differences.append(Difference(line.kind.value, line.engine_id, what, left))
    return differences


def _unrecorded(receipt: Receipt, world: Inventory) -> list[Difference]:
    """Finds by label the resources that were made for this run and never recorded."""
    known = {line.engine_id for line in receipt.objects}
    ended = {line.id for line in receipt.instances if line.ended}
    differences = []
    for thing in world.things:
        if thing.age_s <= _YOUNG_S or thing.id in known:
            continue
        if thing.run_id == receipt.run_id:
            differences.append(Difference(thing.kind.value, thing.id, f"never recorded: {thing.name}", True))
        elif thing.role == "instance" and thing.instance_id in ended:
            differences.append(
                Difference(thing.kind.value, thing.id, "the container of an instance that has ended", True)
            )
    return differences


def _instances_differ(receipt: Receipt, world: Inventory) -> list[Difference]:
    differences = []
    for line in receipt.instances:
        alive = world.instances.get(line.provider)
        what, left = None, False
        if alive is not None and line.ended and line.id in alive:
            what, left = f"on record as {line.state}, and {line.provider} still has it", True
        elif alive is not None and not line.ended and line.id not in alive:
            what = f"on record as {line.state}, and {line.provider} does not have it"
        elif line.why is not None and not line.accounted:
            what, left = line.why, True
        if what is not None:
            differences.append(Difference("instance", str(line.id), what, left))
    return differences
