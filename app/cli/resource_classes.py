"""Commands about resource classes: `megaflow classes [set | remove]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from app.cli.limits import number
from app.cli.show import Json, answer, listing
from app.client import MegaFlow
from app.errors import LimitInvalid
from app.ledger import classes as ledger
from app.ledger.classes import ResourceClass

classes = typer.Typer(help="Resource classes: kinds of instances, each with its own queues and capacity.")


@classes.callback(invoke_without_command=True)
def list_(context: typer.Context, json: Json = False) -> None:
    """Resource classes: kinds of instances, each with its own queues and capacity."""
    if context.invoked_subcommand is not None:
        return
    with MegaFlow() as flow:
        listing(list(_load(flow).values()), _COLUMNS, json=json)


_COLUMNS: dict[str, Callable[[ResourceClass], str]] = {
    "class": lambda one: one.name,
    "cpus": lambda one: "-" if one.cpus is None else f"{one.cpus:g}",
    "memory": lambda one: "-" if one.memory_bytes is None else ByteSize(one.memory_bytes).human_readable(),
    "gpus": lambda one: str(one.gpus),
    "arch": lambda one: one.architecture or "any",
    "ephemeral": lambda one: str(one.ephemeral_capacity),
    "pool": lambda one: f"{one.pool_min} to {one.pool_max}",
    "slots": lambda one: str(one.pool_slots),
    "cooldown": lambda one: f"{one.pool_cooldown_s:g} s",
    "provider": lambda one: one.ephemeral_provider,
    "pool's provider": lambda one: one.persistent_provider,
}


def _load(flow: MegaFlow) -> dict[str, ResourceClass]:
    with flow.database.begin() as connection:
        return ledger.load(connection, flow.settings)


@classes.command(name="set")
def set_(
    name: Annotated[str, typer.Argument(help="Name of a new or an existing class.")],
    cpus: Annotated[str | None, typer.Option(help="CPUs of one instance.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of one instance, e.g. 4GiB.")] = None,
    gpus: Annotated[str | None, typer.Option(help="GPUs of one instance.")] = None,
    arch: Annotated[str | None, typer.Option(help="amd64 or arm64.")] = None,
    ephemeral: Annotated[str | None, typer.Option(help="Maximum number of ephemeral instances.")] = None,
    ephemeral_provider: Annotated[str | None, typer.Option(help="Provider of ephemeral instances.")] = None,
    persistent_provider: Annotated[str | None, typer.Option(help="Provider of standing instances.")] = None,
    pool_min: Annotated[str | None, typer.Option(help="Minimum number of standing instances.")] = None,
    pool_max: Annotated[str | None, typer.Option(help="Maximum number of standing instances.")] = None,
    slots: Annotated[str | None, typer.Option(help="Attempts at once on a standing instance.")] = None,
    cooldown: Annotated[str | None, typer.Option(help="Seconds without work before the pool shrinks.")] = None,
    json: Json = False,
) -> None:
    """Define or change a class. The value `default` restores the setting. In force at once."""
    numbers = {
        "cpus": cpus,
        "gpus": gpus,
        "ephemeral_capacity": ephemeral,
        "pool_min": pool_min,
        "pool_max": pool_max,
        "pool_slots": slots,
        "pool_cooldown_s": cooldown,
    }
    words = {
        "architecture": arch,
        "ephemeral_provider": ephemeral_provider,
        "persistent_provider": persistent_provider,
    }
    changes: dict[str, Any] = {column: _number(column, text) for column, text in numbers.items() if text is not None}
    changes |= {column: _word(text) for column, text in words.items() if text is not None}
    if memory is not None:
        changes["memory_bytes"] = _word(memory) and size_bytes(memory)
    with MegaFlow() as flow:
        ledger.set_class(flow.database, name, **changes)
        offer = _load(flow)[name]
    pool = f"pool of {offer.pool_min} to {offer.pool_max} with {offer.pool_slots} slot(s) each"
    answer(offer, f"class {name}: {offer.ephemeral_capacity} ephemeral instance(s), {pool}", json=json)


@classes.command()
def remove(name: Annotated[str, typer.Argument()], json: Json = False) -> None:
    """Remove a class. Refused while its tasks wait or run, or its instances live."""
    with MegaFlow() as flow:
        ledger.remove_class(flow.database, name)
    answer({"name": name}, f"class {name} removed", json=json)


_DEFAULT = "default"


def _word(said: str) -> str | None:
    return None if said == _DEFAULT else said


def _number(column: str, said: str) -> float | None:
    """Raises: LimitInvalid."""
    return None if said == _DEFAULT else number(f"{column} (or `{_DEFAULT}`)", said)


def size_bytes(said: str) -> int:
    """Returns a size in bytes: `4GiB` is 4 << 30, `4GB` is 4 * 1000**3, `4096` is 4096. Raises: LimitInvalid."""
    try:
        return TypeAdapter(ByteSize).validate_python(said)
    except ValidationError:
        raise LimitInvalid(f"expected a size such as 4GiB, 512MiB or 2GB, found {said!r}") from None
