"""Finds a dataset by its path or by the name `demo`, and its format."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import structlog

from app.datasets.base import DatasetFormat, Reading
from app.datasets.harbor import HarborFormat
from app.datasets.swebench import SweBenchFormat
from app.datasets.terminal_bench import TerminalBenchFormat
from app.errors import DatasetInvalid, SpecInvalid
from app.models.spec import IMAGELESS, AgentTask

log = structlog.get_logger(__name__)

__all__ = ["DEMO", "FORMATS", "Reading", "load"]

DEMO = Path(__file__).parent / "demo"
_SEVERAL = "several"
"""The demo's tasks of several containers: not for hosts that have none."""
_TASK_FILES = ("task.toml", "task.yaml")
"""What makes a folder a task: of Harbor, of the first Terminal-Bench."""
FORMATS: tuple[DatasetFormat, ...] = (SweBenchFormat(), HarborFormat(), TerminalBenchFormat())

_ACCEPTED = (
    "the name demo; a .jsonl file or a .json list of rows, or a folder with rows.jsonl; "
    "a task folder in the Harbor format (task.toml) or the first Terminal-Bench's (task.yaml), or a folder of them; "
    "a folder of such folders"
)


def load(argument: str, reading: Reading) -> list[AgentTask]:
    """Every task of the dataset that `argument` names, in its order.

    Raises: DatasetInvalid: not there, no known format, one bad row or folder, one name twice; nothing is used then.
    """
    path = DEMO if argument == "demo" else Path(argument).expanduser()
    if not path.exists():
        raise DatasetInvalid(f"dataset {argument!r}: expected {_ACCEPTED}; found nothing at {path.absolute()}")
    try:
        tasks = _read(path, reading, without=_SEVERAL if path == DEMO and reading.kind in IMAGELESS else None)
    except OSError as error:
        raise DatasetInvalid(f"dataset {argument!r}: expected to be able to read it; found {error}") from error
    except SpecInvalid as error:
        if isinstance(error, DatasetInvalid):
            raise
        raise DatasetInvalid(f"dataset {argument!r}: {error}") from error
    _refuse_doubles(tasks, argument)
    return tasks


def _read(path: Path, reading: Reading, *, without: str | None = None) -> list[AgentTask]:
    if chosen := _format_of(path):
        _look_beside(path)
        return chosen.read(path, reading)
    folders = [child for child in path.iterdir() if child.is_dir()] if path.is_dir() else []
    inner = sorted(child for child in folders if child.name != without)
    if without is not None:
        log.warning("dataset.left_out", folder=without, why="its tasks have several containers: --environment docker")
    known = [(child, chosen) for child in inner if (chosen := _format_of(child))]
    if not known:
        raise DatasetInvalid(f"{path}: expected {_ACCEPTED}; found {_looks_like(path)}")
    tasks = [task for child, chosen in known for task in chosen.read(child, reading)]
    return [task.model_copy(update={"dataset": path.resolve().name}) for task in tasks]


def _look_beside(path: Path) -> None:
    """Raises: DatasetInvalid: a folder of tasks of two formats. What is no task there is named in the log."""
    if path.is_file() or any((path / file).is_file() for file in _TASK_FILES):
        return
    folders = sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    found = {folder.name: next((file for file in _TASK_FILES if (folder / file).is_file()), None) for folder in folders}
    if len(kinds := {file for file in found.values() if file is not None}) > 1:
        told = "; ".join(f"{file} in {_names(name for name, its in found.items() if its == file)}" for file in kinds)
        raise DatasetInvalid(f"{path}: expected tasks of one format; found {told}; submit one folder for each format")
    if kinds and (others := [name for name, file in found.items() if file is None]):
        log.warning("dataset.folders_passed_over", folders=_names(others), expected=f"a folder with {kinds.pop()}")


def _names(names: Iterable[str]) -> str:
    listed = list(names)
    return f"{', '.join(listed[:6])}{' …' if len(listed) > 6 else ''}"


def _format_of(path: Path) -> DatasetFormat | None:
    return next((known for known in FORMATS if known.recognises(path)), None)


def _looks_like(path: Path) -> str:
    if path.is_file():
        return f"a file that ends in {path.suffix!r}"
    names = sorted(child.name for child in path.iterdir())
    return f"a folder with {', '.join(names[:6])}{' …' if len(names) > 6 else ''}" if names else "an empty folder"


def _refuse_doubles(tasks: list[AgentTask], argument: str) -> None:
    seen: set[str] = set()
    for task in tasks:
        if task.name in seen:
            raise DatasetInvalid(f"dataset {argument!r}: expected one task of each name; found {task.name!r} twice")
        seen.add(task.name)
