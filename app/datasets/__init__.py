"""Finds datasets by name or path, reads them lazily, and chooses among their tasks."""

from __future__ import annotations

from app.datasets.base import Reading
from app.datasets.folder_dataset import refuse_doubles
from app.datasets.source import DEMO, FORMATS, open_dataset
from app.errors import DatasetInvalid, SpecInvalid
from app.models.spec import AgentTask

__all__ = ["DEMO", "FORMATS", "Reading", "load", "open_dataset"]


def load(argument: str, reading: Reading) -> list[AgentTask]:
    """Every task of the dataset that `argument` names, in its order.

    Raises: DatasetInvalid: not there, no known format, one bad row or folder, one name twice; nothing is used then.
    """
    try:
        tasks = list(open_dataset(argument, reading).tasks())
    except OSError as error:
        raise DatasetInvalid(f"dataset {argument!r}: expected to be able to read it; found {error}") from error
    except SpecInvalid as error:
        if isinstance(error, DatasetInvalid):
            raise
        raise DatasetInvalid(f"dataset {argument!r}: {error}") from error
    refuse_doubles([task.name for task in tasks], argument)
    return tasks
