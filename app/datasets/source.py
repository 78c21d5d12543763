"""Finds the dataset that an argument names, and the rules that read it.

NAME or NAME@REVISION is a known dataset, from the hub or from git. NAME=PATH is a local copy of it. PATH is rows or
task folders; their rules are recognised by their content or given: nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from app.datasets.base import DatasetFormat, Reading, RowAdapter
from app.datasets.catalogue import CATALOGUE, KnownDataset, near
from app.datasets.entries import OpenedDataset
from app.datasets.folder_dataset import TASK_FILES, FolderDataset, SeveralDatasets
from app.datasets.git_folders import checkout, folders_of, is_registry, refuse_pointers, registered
from app.datasets.harbor import HARBOR
from app.datasets.hub import fetch, files_of
from app.datasets.row_dataset import DatasetAddress, RowDataset
from app.datasets.row_files import ENDINGS, RawRow, rows
from app.datasets.rows import ADAPTERS
from app.datasets.terminal_bench import TERMINAL_BENCH
from app.errors import DatasetInvalid, DatasetUnknown, UnknownName
from app.models.spec import IMAGELESS, EnvironmentKind
from app.task_files import inside

log = structlog.get_logger(__name__)

DEMO = Path(__file__).parent / "demo"
_SEVERAL = "several"
"""Folder of the demo's tasks with several containers, for hosts with container support only."""
FORMATS = (HARBOR, TERMINAL_BENCH)
_NAMED = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?:@(?P<revision>[^=]+))?")
_ACCEPTED = (
    "the name demo; a .jsonl file, a .json list, a .parquet file of rows, or a folder of them; a registry.json; "
    "a task folder in the Harbor format (task.toml) or the first Terminal-Bench's (task.yaml), or a folder of them; "
    "a folder of such folders"
)


@dataclass(frozen=True, slots=True)
class DatasetArgument:
    """A dataset as named in a submission."""

    text: str
    name: str | None = None
    revision: str | None = None
    path: Path | None = None


def arguments_of(text: str) -> tuple[str, ...]:
    """Splits an argument that may be several datasets with commas between; an existing path with a comma stays one."""
    if Path(text).expanduser().exists():
        return (text,)
    return tuple(part.strip() for part in text.split(",") if part.strip()) or (text,)


def parsed(text: str, adapters: Mapping[str, RowAdapter] = ADAPTERS) -> DatasetArgument:
    """Parses an argument. The name of a known dataset overrides a path: write `./NAME` for the path.

    Raises: DatasetUnknown: neither a known name nor an existing path.
    """
    if not text.strip():
        raise DatasetUnknown(f"expected a dataset: {_ACCEPTED}; found an empty text")
    left, equals, right = text.partition("=")
    name_match = _NAMED.fullmatch(left)
    if equals and name_match is not None and not Path(text).expanduser().exists():
        path = Path(right).expanduser()
        if not right or not path.exists():
            raise DatasetUnknown(f"dataset {text!r}: expected {_ACCEPTED}; found nothing at {path.absolute()}")
        if not is_registry(path) and name_match["name"] not in CATALOGUE and name_match["name"] not in adapters:
            names = sorted({*CATALOGUE, *adapters})
            raise DatasetUnknown(f"dataset {text!r}: expected NAME=PATH with one of {', '.join(names)}; {near(left)}")
        return DatasetArgument(text, name_match["name"], name_match["revision"], path)
    if text == "demo":
        return DatasetArgument(text, path=DEMO)
    if name_match is not None and name_match["name"] in CATALOGUE:
        return DatasetArgument(text, name_match["name"], name_match["revision"])
    path = Path(text).expanduser()
    if not path.exists():
        raise DatasetUnknown(
            f"dataset {text!r}: expected NAME of a known dataset, NAME=PATH, or a path: {_ACCEPTED}; found nothing at"
            f" {path.absolute()}; {near(text)}"
        )
    return DatasetArgument(text, path=path)


def open_dataset(text: str, reading: Reading, adapters: Mapping[str, RowAdapter] = ADAPTERS) -> OpenedDataset:
    """Opens the dataset that an argument names.

    Raises: DatasetInvalid: missing, an unknown format, or ambiguous rules; UnknownName: a revision or version;
        DatasetUnavailable: it must be fetched, and cannot be; DependencyMissing; SpecInvalid.
    """
    argument = parsed(text, adapters)
    try:
        if argument.path is not None:
            return _local(argument, argument.path, reading, adapters)
        dataset = CATALOGUE[str(argument.name)]
        return (
            _in_git(dataset, argument, reading) if dataset.versions else _on_hub(dataset, argument, reading, adapters)
        )
    except OSError as error:
        raise DatasetInvalid(f"dataset {text!r}: expected to be able to read it; found {error}") from error


def _on_hub(
    dataset: KnownDataset, asked: DatasetArgument, reading: Reading, adapters: Mapping[str, RowAdapter]
) -> OpenedDataset:
    adapter = _adapter(dataset.adapter, asked, adapters)
    folder, files = fetch(dataset, asked.revision)
    address = DatasetAddress(
        dataset.name, asked.text, dataset.hub_id, folder.name, dataset.language, dataset.path_languages
    )
    return RowDataset(address, files, adapter, reading)


def _in_git(dataset: KnownDataset, asked: DatasetArgument, reading: Reading) -> OpenedDataset:
    _, where = dataset.version(asked.revision)
    address = DatasetAddress(dataset.name, asked.text, revision=where.commit)
    root = checkout(where, reading.cache)
    refuse_pointers(root)
    return FolderDataset(address, root, _format_named(dataset.adapter), reading)


def _adapter(name: str, asked: DatasetArgument, adapters: Mapping[str, RowAdapter]) -> RowAdapter:
    if name not in adapters:
        raise UnknownName(f"dataset {asked.text!r}: expected the rules of {name}; known: {', '.join(sorted(adapters))}")
    return adapters[name]


def _format_named(name: str) -> DatasetFormat:
    return next(one for one in FORMATS if one.name == name)


def _local(asked: DatasetArgument, path: Path, reading: Reading, adapters: Mapping[str, RowAdapter]) -> OpenedDataset:
    if is_registry(path):
        return _of_registry(asked, path, reading)
    known = CATALOGUE.get(asked.name or "")
    if known is not None and known.versions:
        address = DatasetAddress(known.name, asked.text, revision=asked.revision)
        return FolderDataset(address, path, _format_named(known.adapter), reading)
    if asked.revision is not None:
        raise DatasetUnknown(
            f"dataset {asked.text!r}: expected NAME=PATH, as a local copy has no revision to choose;"
            f" found @{asked.revision}; its content hash is recorded instead"
        )
    if files := _row_files(path, known):
        return _rows(asked, path, files, reading, adapters)
    if asked.name is not None:
        expected = f"files of rows ({', '.join(ENDINGS)})"
        raise DatasetInvalid(f"dataset {asked.text!r}: expected {expected}; found {_looks_like(path)}")
    return _folders(asked, path, reading, adapters)


def _of_registry(asked: DatasetArgument, path: Path, reading: Reading) -> OpenedDataset:
    label = f"{asked.name}@{asked.revision}" if asked.revision else asked.name
    dataset = registered(path, label)
    folders = folders_of(dataset, reading.cache)
    formats = {one.name: one for folder in folders for one in FORMATS if one.recognises(folder)}
    if len(formats) != 1:
        raise DatasetInvalid(f"dataset {asked.text!r}: expected task folders of one format; found {sorted(formats)}")
    address = DatasetAddress(dataset.name, asked.text, revision=dataset.version)
    return FolderDataset(address, path.parent, next(iter(formats.values())), reading, folders)


def _row_files(path: Path, known: KnownDataset | None) -> Sequence[Path]:
    if path.is_file():
        return [path] if path.suffix in ENDINGS else []
    if (path / "rows.jsonl").is_file():
        return [_in_folder(path, path / "rows.jsonl")]
    if known is not None and (split_files := files_of(path, known)):
        return [_in_folder(path, file) for file in split_files]
    for ending in (".parquet", ".jsonl"):
        below = (
            sorted(file for file in path.rglob(f"*{ending}") if file.is_file())
            if known is not None
            else (sorted(file for pattern in (f"*{ending}", f"data/*{ending}") for file in path.glob(pattern)))
        )
        if below:
            return [_in_folder(path, file) for file in below]
    return []


def _in_folder(folder: Path, file: Path) -> Path:
    """Returns the file. A link may lead only within the folder, or in a hub's cache to the blobs near snapshots."""
    blobs = folder.resolve().parent.parent / "blobs"
    if folder.resolve().parent.name == "snapshots" and file.resolve().parent == blobs:
        return file
    inside(folder, file)
    return file


def _rows(
    asked: DatasetArgument,
    path: Path,
    files: Sequence[Path],
    reading: Reading,
    adapters: Mapping[str, RowAdapter],
) -> OpenedDataset:
    known = CATALOGUE.get(asked.name or "")
    stem = path.resolve().name if path.is_dir() else path.stem
    name = stem if known is None else known.name
    if asked.name is None:
        adapter = recognised(asked, files[0], adapters)
    else:
        adapter = _adapter(known.adapter if known is not None else asked.name, asked, adapters)
    language = known.language if known is not None else _language(adapter.name)
    languages = known.path_languages if known is not None else ()
    address = DatasetAddress(name, asked.text, language=language, path_languages=languages)
    return RowDataset(address, files, adapter, reading)


def _language(adapter: str) -> str | None:
    """Returns the language that all datasets of one adapter share, if any."""
    languages = {one.language for one in CATALOGUE.values() if one.adapter == adapter}
    return languages.pop() if len(languages) == 1 else None


def _first(file: Path) -> RawRow:
    """Returns the first readable row. Raises: DatasetInvalid: there is none; with the fault of the first."""
    fault: DatasetInvalid | None = None
    for raw in rows(file):
        if raw.fault is None:
            return raw
        fault = fault or raw.fault
    raise fault or DatasetInvalid(f"{file}: expected at least one row; found none")


def recognised(asked: DatasetArgument, file: Path, adapters: Mapping[str, RowAdapter]) -> RowAdapter:
    """Returns the rules that read the file, by columns that no other dataset has.

    Raises: DatasetInvalid: there is no row, or the rules are ambiguous: names the choices.
    """
    first = _first(file)
    fitting = {one.name: one for one in adapters.values() if one.recognises(first.values)}
    if len(fitting) == 1:
        return next(iter(fitting.values()))
    possible = sorted(
        name
        for name, one in adapters.items()
        if (one.name in fitting if fitting else one.columns <= first.values.keys())
    )
    possible.sort(key=lambda name: -len(adapters[name].columns))  # most specific columns first
    names = [name for rules in possible for name, one in CATALOGUE.items() if one.adapter == rules] or possible
    if not names:
        columns = ", ".join(sorted(map(str, first.values))[:20])
        raise DatasetInvalid(
            f"dataset {asked.text!r}: expected rows of a known dataset, or with test_cmd and log_parser; found the"
            f" columns {columns}; `megaflow dataset list` has the known"
        )
    raise DatasetUnknown(
        f"dataset {asked.text!r}: expected to tell whose rows they are, by columns that no other dataset has; found"
        f" those of {len(names)} datasets; name it: {names[0]}={asked.text}; they may be of {', '.join(names)}"
    )


def _folders(asked: DatasetArgument, path: Path, reading: Reading, adapters: Mapping[str, RowAdapter]) -> OpenedDataset:
    address = DatasetAddress(path.resolve().name, asked.text)
    if chosen := _format_of(path):
        _look_beside(path)
        return FolderDataset(address, path, chosen, reading)
    alone = (*IMAGELESS, EnvironmentKind.KUBERNETES)  # kinds without several containers
    without = _SEVERAL if path == DEMO and reading.kind in alone else None
    if without is not None:
        log.warning("dataset.left_out", folder=without, why="its tasks have several containers: --environment docker")
    children = [child for child in path.iterdir() if child.is_dir()] if path.is_dir() else []
    parts: list[OpenedDataset] = []
    for child in sorted(one for one in children if one.name != without):
        if chosen := _format_of(child):
            parts.append(FolderDataset(address, child, chosen, reading))
        elif (child / "rows.jsonl").is_file():
            files = [_in_folder(child, child / "rows.jsonl")]
            parts.append(_rows(DatasetArgument(asked.text), child, files, reading, adapters))
    if not parts:
        raise DatasetInvalid(f"dataset {asked.text!r}: {path}: expected {_ACCEPTED}; found {_looks_like(path)}")
    return SeveralDatasets(address, parts)


def _format_of(path: Path) -> DatasetFormat | None:
    return next((known for known in FORMATS if known.recognises(path)), None)


def _look_beside(path: Path) -> None:
    """Logs other folders. Raises: DatasetInvalid: a folder has tasks of two formats."""
    if path.is_file() or any((path / file).is_file() for file in TASK_FILES):
        return
    folders = sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    files = {folder.name: next((file for file in TASK_FILES if (folder / file).is_file()), None) for folder in folders}
    if len(kinds := {file for file in files.values() if file is not None}) > 1:
        summary = "; ".join(f"{file} in {_names([n for n, its in files.items() if its == file])}" for file in kinds)
        raise DatasetInvalid(
            f"{path}: expected tasks of one format; found {summary}; submit one folder for each format"
        )
    if kinds and (others := [name for name, file in files.items() if file is None]):
        log.warning("dataset.folders_passed_over", folders=_names(others), expected=f"a folder with {kinds.pop()}")


def _names(listed: Sequence[str]) -> str:
    return f"{', '.join(listed[:6])}{' …' if len(listed) > 6 else ''}"


def _looks_like(path: Path) -> str:
    if path.is_file():
        return f"a file that ends in {path.suffix!r}"
    names = sorted(child.name for child in path.iterdir())
    return f"a folder with {_names(names)}" if names else "an empty folder"
