"""Commands about datasets: `megaflow dataset list | pull | show | filter | lint`; `validate.py` has the others."""

from __future__ import annotations

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
from app.cli.validate import validate
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

dataset = typer.Typer(help="Datasets: list, fetch, look at and check them.", no_args_is_help=True)
dataset.command()(validate)

_SHOWN = 10
"""Maximum number of languages, repositories and task names shown."""
_LONGEST_FAULT = 300
"""Maximum number of terminal cells of a fault's line; `--json` has it whole."""
_BAD = 65
"""Exit code of a dataset with bad rows, as in sysexits."""


@dataclass(frozen=True, slots=True)
class LintFindings:
    """Every fault of a dataset, and how many of its tasks have none."""

    tasks: int
    faults: tuple[DatasetFault, ...]


@contextmanager
def opened_dataset(
    name: str, settings: Settings, kind: EnvironmentKind = EnvironmentKind.DOCKER, *, strict: bool = False
) -> Iterator[OpenedDataset]:
    """Opens the dataset that an argument names. strict: as `Reading.strict`.

    Raises: as `open_dataset` and the caller's block; an OSError becomes DatasetInvalid.
    """
    try:
        with reading_of(settings, kind, store=False) as reading:
            yield open_dataset(name, replace(reading, strict=strict))
    except OSError as error:
        raise DatasetInvalid(f"dataset {name!r}: expected to read it; found {error}") from error


def linted(name: str, settings: Settings, kind: EnvironmentKind = EnvironmentKind.DOCKER) -> LintFindings:
    """Reads every row or folder by the dataset's rules and collects the faults.

    Raises: DatasetUnknown, UnknownName, DatasetUnavailable, DependencyMissing: it cannot be read at all.
    """
    try:
        with opened_dataset(name, settings, kind, strict=True) as dataset:
            checks = list(dataset.checked())
            faults = tuple(filter(None, checks))
            if not faults:
                dataset.entries()  # raises when something is missing, or two tasks have one name
    except DatasetUnknown:
        raise
    except SpecInvalid as error:
        return LintFindings(0, (fault_of(error, name),))
    return LintFindings(checks.count(None), faults)


@dataset.command(name="list")
def list_datasets(json: Json = False) -> None:
    """List the datasets that are known by name: rows as their makers state, source, licence."""
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
    """Fetch a dataset by name into the hub's cache (from git: MegaFlow's own), and print its revision and hash."""
    with opened_dataset(name, load()) as opened:
        about = opened.origin()
    if json:
        as_json(asdict(about))
        return
    rows = [("dataset", about.name), ("from", about.hub_id or about.argument), ("revision", about.revision or "-")]
    _pairs([*rows, ("tasks", str(about.tasks)), ("content", about.content_hash)])


@dataset.command()
def show(name: Named, environment: Kind = EnvironmentKind.DOCKER, json: Json = False) -> None:
    """Show a dataset's columns, languages, repositories, content hash and first names, without making its tasks."""
    with opened_dataset(name, load(), environment) as opened:
        about, entries, columns = opened.origin(), opened.entries(), opened.columns()
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
    """Prints `key`, then its values, wrapped below one another."""
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
    pass_rate: Annotated[str, typer.Option(metavar="BOUNDS", help="Only tasks with a pass rate within: '0<p<1'.")],
    pass_rate_from: Annotated[str, typer.Option("--from", metavar="RUN", help="The run that --pass-rate applies to.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to make; it must not exist yet.")],
    environment: Kind = EnvironmentKind.DOCKER,
    json: Json = False,
) -> None:
    """Write the tasks with a given pass rate in a run as a new dataset, with its provenance."""
    from app.client import MegaFlow
    from app.evaluation.dataset_filter import filter_dataset

    with MegaFlow() as flow, opened_dataset(name, flow.settings, environment) as opened:
        result = filter_dataset(opened, flow.database, pass_rate=pass_rate, pass_rate_from=pass_rate_from, to=output)
    if json:
        as_json(result)
        return
    counts = f"{result.chosen} of {result.tasks} tasks, of which run {result.run} scored {result.rated}"
    console.print(f"{counts}, with {result.pass_rate}: {result.path}", soft_wrap=True)
    console.print(f"megaflow submit {shlex.quote(result.argument)} -a AGENT", soft_wrap=True)


@dataset.command()
def lint(name: Named, environment: Kind = EnvironmentKind.DOCKER, json: Json = False) -> None:
    """Read every row by its dataset's rules and print every fault. Exit code 65: there is a fault."""
    findings = linted(name, load(), environment)
    if json:
        as_json({"dataset": name, "tasks": findings.tasks, "faults": [asdict(one) for one in findings.faults]})
    else:
        for fault in findings.faults:
            console.print(shortened(fault.message, _LONGEST_FAULT), soft_wrap=True)
        say(f"{name}: {counted(findings.tasks, 'task')}, {counted(len(findings.faults), 'fault')}")
    if findings.faults:
        raise typer.Exit(_BAD)
