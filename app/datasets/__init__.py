"""The datasets that can be submitted: a path in one of the known formats, or the name `demo`."""

from __future__ import annotations

from pathlib import Path

from app.datasets.base import DatasetFormat, Reading
from app.datasets.harbor import HarborFormat
from app.datasets.swebench import SweBenchFormat
from app.datasets.terminal_bench import TerminalBenchFormat
from app.errors import DatasetInvalid, SpecInvalid
from app.models.spec import IMAGELESS, AgentTask

__all__ = ["DEMO", "FORMATS", "Reading", "load"]

DEMO = Path(__file__).parent / "demo"
_SEVERAL = "several"
"""The demo's tasks of several containers: not for hosts that have none."""
FORMATS: tuple[DatasetFormat, ...] = (SweBenchFormat(), HarborFormat(), TerminalBenchFormat())

_ACCEPTED = (
    "the name demo; a .jsonl file or a .json list of rows in the SWE-bench schema, or a folder with rows.jsonl; "
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
        return chosen.read(path, reading)
    folders = [child for child in path.iterdir() if child.is_dir()] if path.is_dir() else []
    inner = sorted(child for child in folders if child.name != without)
    known = [(child, chosen) for child in inner if (chosen := _format_of(child))]
    if not known:
        raise DatasetInvalid(f"{path}: expected {_ACCEPTED}; found {_looks_like(path)}")
    tasks = [task for child, chosen in known for task in chosen.read(child, reading)]
    return [task.model_copy(update={"dataset": path.resolve().name}) for task in tasks]


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
