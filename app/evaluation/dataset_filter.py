"""Writes the tasks with a given pass rate in a run as a separate dataset, with its provenance."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import UUID

from app.datasets.entries import DatasetOrigin, OpenedDataset
from app.datasets.selection import Selection, choose, within
from app.datasets.source import parsed
from app.errors import DatasetInvalid
from app.evaluation.export import new_place
from app.evaluation.report import BASELINES
from app.ledger import results
from app.ledger.database import Database
from app.models.spec import PlainText, Wire, plain_text

PROVENANCE = "megaflow-provenance.json"
"""File next to the rows or task folders: their source, and how they were selected."""
_MOST_PROVENANCE_BYTES = 1 << 20


class Derivation(Wire):
    """Origin of a filtered dataset. source: a `DatasetOrigin`; rated: tasks of the source that the run scored."""

    source: dict[PlainText, PlainText | int | bool | None]
    run: PlainText
    run_id: UUID
    pass_rate: PlainText
    tasks: int
    rated: int
    chosen: int


class FilteredDataset(Derivation):
    """A written dataset, and the argument by which `megaflow submit` reads it."""

    path: str
    argument: str


def filter_dataset(
    opened: OpenedDataset, database: Database, *, pass_rate: str, pass_rate_from: str, to: Path
) -> FilteredDataset:
    """Writes the tasks whose pass rate in a run is within bounds such as `0<p<1` to the folder `to`.

    Raises: UnknownName: no such run; SpecInvalid: no bounds, or no task is left; ExportRefused: `to` exists;
        DatasetInvalid, OSError.
    """
    within(pass_rate)
    selection = Selection(pass_rate=pass_rate, pass_rate_from=pass_rate_from)
    run_id = results.find(database, "runs", pass_rate_from)
    rates, head = results.pass_rates(database, run_id, BASELINES), results.run_head(database, run_id)
    entries = opened.entries()
    chosen = choose(entries, selection, opened.name, rates)
    origin = opened.origin()
    derivation = Derivation(
        source={**asdict(origin), "argument": plain_text(origin.argument)},
        run=head.name,
        run_id=run_id,
        pass_rate=pass_rate,
        tasks=len(entries),
        rated=sum(entry.name in rates for entry in entries),
        chosen=len(chosen),
    )
    with new_place(to) as part:
        part.mkdir()
        opened.copy({entry.name for entry in chosen}, part)
        (part / PROVENANCE).write_text(derivation.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return FilteredDataset(**dict(derivation), path=str(to), argument=f"{_rules(origin)}{to}")


def _rules(origin: DatasetOrigin) -> str:
    """Returns `NAME=` where rows are read by a dataset's rules. Task folders and mixed datasets name them inside."""
    return f"{parsed(origin.argument).name or origin.adapter}=" if origin.of_rows else ""


def derived_from(origin: DatasetOrigin) -> dict[str, Any]:
    """Reads the provenance next to a filtered dataset; empty for others. Raises: DatasetInvalid: malformed."""
    path = parsed(origin.argument).path
    file = path / PROVENANCE if path is not None and path.is_dir() else None
    if file is None or not file.is_file():
        return {}
    try:
        if file.stat().st_size > _MOST_PROVENANCE_BYTES:
            raise ValueError(f"more than {_MOST_PROVENANCE_BYTES} bytes")
        derivation = Derivation.model_validate_json(file.read_bytes())
    except ValueError as error:
        why = " ".join(str(error).split())[:200]
        raise DatasetInvalid(f"{file}: expected what `megaflow dataset filter` wrote; found {why}") from error
    return {"derived_from": derivation.model_dump(mode="json")}
