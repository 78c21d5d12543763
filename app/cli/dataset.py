"""Commands about datasets: `megaflow dataset list | pull | show | filter | lint`; `validate.py` has the others."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli.show import Json, as_json, console, say
from app.cli.tables import Table, shortened
from app.datasets.catalogue import CATALOGUE, KnownDataset
from app.datasets.entries import DatasetFault, OpenedDataset, fault_of
from app.datasets.source import open_dataset
from app.errors import DatasetInvalid, DatasetUnknown, SpecInvalid
from app.evaluation import reading_of
from app.models.spec import EnvironmentKind
from app.settings import Settings, load
from app.texts import counted

Named = Annotated[str, typer.Argument(metavar="DATASET", help="NAME[@REVISION], NAME=PATH, a path, or `demo`.")]
Kind = Annotated[EnvironmentKind, typer.Option("--environment", help="As for `megaflow submit`.")]

dataset = typer.Typer(help="Datasets: which are known, fetching, looking at and checking them.", no_args_is_help=True)

_SHOWN = 10
"""Of languages, repositories and names of tasks."""
_NUMBER = re.compile(r"(\d+)")
_LONGEST_FAULT = 300
"""Cells of a fault's line; `--json` has it whole."""
_BAD = 65
"""Exit code of a dataset with bad rows, as in sysexits."""


def _by_task(where: str) -> list[tuple[str, int]]:
    """`row 9` before `row 10`."""
    parts = _NUMBER.split(where)
    return [(text, int(number or 0)) for text, number in zip(parts[::2], [*parts[1::2], ""], strict=True)]


@dataclass(frozen=True, slots=True)
class LintFindings:
    """Every fault of a dataset, and how many of its tasks have none."""

    tasks: int
    faults: tuple[DatasetFault, ...]


@contextmanager
def opened_dataset(
    name: str, settings: Settings, kind: EnvironmentKind = EnvironmentKind.DOCKER, *, strict: bool = False
) -> Iterator[OpenedDataset]:
    """The dataset that an argument names. strict: as `Reading.strict`.

    Raises: as `open_dataset` and what is done with it; no plain OSError.
    """
    try:
        with reading_of(settings, kind, store=False) as reading:
            yield open_dataset(name, replace(reading, strict=strict))
    except OSError as error:
        raise DatasetInvalid(f"dataset {name!r}: expected to read it; found {error}") from error


def linted(name: str, settings: Settings, kind: EnvironmentKind = EnvironmentKind.DOCKER) -> LintFindings:
    """Read every row or folder through its rules.

    Raises: DatasetUnknown, UnknownName, DatasetUnavailable, DependencyMissing: it cannot be read at all.
    """
    try:
        with opened_dataset(name, settings, kind, strict=True) as dataset:
            found = list(dataset.checked())
            faults = tuple(sorted(filter(None, found), key=lambda one: _by_task(one.where)))
            if not faults:
                dataset.entries()  # says what is missing, and which two have one name
    except DatasetUnknown:
        raise
    except SpecInvalid as error:
        return LintFindings(0, (fault_of(error, name),))
    return LintFindings(found.count(None), faults)


def register(cli: typer.Typer) -> None:
    from app.cli import validate

    validate.add_to(dataset)
    cli.add_typer(dataset, name="dataset")


@dataset.command(name="list")
def list_datasets(json: Json = False) -> None:
    """The datasets that are known by name: rows as their makers state, where they are, on what terms."""
    if json:
        as_json([_listed(one) for one in CATALOGUE.values()])
        return
    table = Table("dataset", "tasks", "from", "rules", "licence", "citation", "source", "split", keys=3, uncut=True)
    for one in CATALOGUE.values():
        count = "-" if one.rows is None else str(one.rows)
        table.add_row(one.name, count, _place(one), one.adapter, one.licence, one.citation, one.source, one.split)
    console.print(table)
    say("`megaflow dataset pull NAME` fetches one; a local copy is NAME=PATH (docs/howto/datasets.md)")


def _listed(one: KnownDataset) -> dict[str, Any]:
    return {**asdict(one), "from": _place(one), "versions": {name: asdict(where) for name, where in one.versions}}


def _place(one: KnownDataset) -> str:
    if one.versions:
        return one.versions[0][1].url
    return one.hub_id or "a local copy"


@dataset.command()
def pull(name: Named, json: Json = False) -> None:
    """Fetch a dataset by name into the hub's cache (or, of git, ours), and say which bytes came."""
    with opened_dataset(name, load()) as found:
        about = found.origin()
    if json:
        as_json(asdict(about))
        return
    rows = [("dataset", about.name), ("from", about.hub_id or about.argument), ("revision", about.revision or "-")]
    _pairs([*rows, ("tasks", str(about.tasks)), ("content", about.content_hash)])


@dataset.command()
def show(name: Named, environment: Kind = EnvironmentKind.DOCKER, json: Json = False) -> None:
    """A dataset's columns, languages, repositories, content hash and first names, without making its tasks."""
    with opened_dataset(name, load(), environment) as found:
        about, entries, columns = found.origin(), found.entries(), found.columns()
    languages = Counter(entry.language or "not said" for entry in entries)
    repositories = Counter(entry.repository or "not said" for entry in entries)
    dates = sorted(entry.created_at for entry in entries if entry.created_at is not None)
    first = [entry.name for entry in entries[:_SHOWN]]
    if json:
        as_json(
            {
                **asdict(about),
                "columns": columns,
                "languages": dict(languages.most_common()),
                "repositories": dict(repositories.most_common()),
                "created": [dates[0], dates[-1]] if dates else None,
                "first": first,
            }
        )
        return
    _pairs(
        [
            ("dataset", about.name),
            ("rules", about.adapter),
            ("from", about.hub_id or about.argument),
            ("revision", about.revision or "-"),
            ("content", about.content_hash),
            ("tasks", str(about.tasks)),
            ("created", f"{dates[0]:%Y-%m-%d} to {dates[-1]:%Y-%m-%d}" if dates else "not said"),
        ]
    )
    _listing("columns", columns)
    _listing("languages", _counts(languages))
    _listing("repositories", _counts(repositories))
    _listing("first", first)


def _pairs(rows: Sequence[tuple[str, str]]) -> None:
    for key, value in rows:
        console.print(f"{key:<13} {value}", soft_wrap=True)


def _counts(counter: Counter[str]) -> list[str]:
    shown = [f"{name} {count}" for name, count in counter.most_common(_SHOWN)]
    return shown + ([f"and {len(counter) - _SHOWN} more"] if len(counter) > _SHOWN else [])


def _listing(key: str, values: Sequence[str]) -> None:
    """`key`, then the values, wrapped below one another."""
    lines, line = [], ""
    for value in values:
        if line and len(line) + 2 + len(value) > 64:
            lines.append(f"{line},")
            line = ""
        line = f"{line}, {value}" if line else value
    for place, text in enumerate([*lines, line or "none"]):
        console.print(f"{key if place == 0 else '':<13} {text}", soft_wrap=True)


@dataset.command(name="filter")
def filter_tasks(
    name: Named,
    pass_rate: Annotated[str, typer.Option(metavar="BOUNDS", help="Only tasks with such a pass rate: '0<p<1'.")],
    pass_rate_from: Annotated[str, typer.Option("--from", metavar="RUN", help="The run of --pass-rate.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to make; it must not exist yet.")],
    environment: Kind = EnvironmentKind.DOCKER,
    json: Json = False,
) -> None:
    """Write the tasks that a run solved as often as asked for as a dataset of its own, with its provenance."""
    from app.client import MegaFlow
    from app.evaluation.dataset_filter import filter_dataset

    with MegaFlow() as flow, opened_dataset(name, flow.settings, environment) as opened:
        found = filter_dataset(opened, flow.database, pass_rate=pass_rate, pass_rate_from=pass_rate_from, to=output)
    if json:
        as_json(found)
        return
    counts = f"{found.chosen} of {found.tasks} tasks, of which run {found.run} scored {found.rated}"
    console.print(f"{counts}, with {found.pass_rate}: {found.path}", soft_wrap=True)
    console.print(f"megaflow submit {shlex.quote(found.argument)} -a AGENT", soft_wrap=True)


@dataset.command()
def lint(name: Named, environment: Kind = EnvironmentKind.DOCKER, json: Json = False) -> None:
    """Read every row through its dataset's rules and name every fault; exit code 65 when there is one."""
    found = linted(name, load(), environment)
    if json:
        as_json({"dataset": name, "tasks": found.tasks, "faults": [asdict(one) for one in found.faults]})
    else:
        for fault in found.faults:
            console.print(shortened(fault.message, _LONGEST_FAULT), soft_wrap=True)
        say(f"{name}: {counted(found.tasks, 'task')}, {counted(len(found.faults), 'fault')}")
    if found.faults:
        raise typer.Exit(_BAD)
