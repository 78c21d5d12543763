"""Defines an opened dataset, and the entries by which its tasks are chosen before any task is made."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from app.datasets.faults import FaultPlace
from app.errors import DatasetInvalid
from app.models.spec import NAME, AgentTask

LANGUAGE_COLUMNS = ("language", "lang", "repo_language")
ENTRY_COLUMNS = ("instance_id", "org", "repo", "number", *LANGUAGE_COLUMNS, "created_at")
"""Columns that an entry is made of; each dataset has some of them."""
FIRST_FAULTS = 10
"""Maximum number of bad rows named in a refusal."""


@dataclass(frozen=True, slots=True)
class TaskEntry:
    """Properties by which a task is chosen. None: not in the dataset."""

    name: str
    repository: str | None = None  # OWNER/NAME
    language: str | None = None  # in lower case, as named in the dataset
    created_at: datetime | None = None  # of the pull request, with a time zone


@dataclass(frozen=True, slots=True)
class DatasetFault:
    """A fault of one row or folder, for `megaflow dataset lint`."""

    where: str
    field: str
    message: str


@dataclass(frozen=True, slots=True)
class DatasetOrigin:
    """Identity of a dataset's bytes: enough to get the same tasks again."""

    name: str
    argument: str  # as in the submission
    content_hash: str  # sha256 of its files' contents
    tasks: int  # before the selection
    adapter: str  # the rules that read it
    hub_id: str | None = None
    revision: str | None = None  # the commit on the hub or in git; None: a local copy
    of_rows: bool = False


class OpenedDataset(Protocol):
    """A dataset that was found and whose rules are known. Only its entries are held in memory."""

    @property
    def name(self) -> str:
        """The dataset name that its tasks carry."""
        ...

    def entries(self) -> Sequence[TaskEntry]:
        """Returns one entry for each task, in the dataset's order.

        Raises: DatasetInvalid: names the first bad rows and their number.
        """
        ...

    def tasks(self, chosen: Collection[str] | None = None) -> Iterator[AgentTask]:
        """Yields the tasks with these names, in the dataset's order; None: all. Each is made only when requested.

        Raises: as `entries`, also for rows that an adapter refuses.
        """
        ...

    def copy(self, chosen: Collection[str], folder: Path) -> None:
        """Writes the tasks with these names into an existing folder, which the same rules can open.

        Raises: as `entries`; OSError.
        """
        ...

    def checked(self) -> Iterator[DatasetFault | None]:
        """Yields the fault of each row or folder, read through its adapter; None: it has none."""
        ...

    def origin(self) -> DatasetOrigin:
        """Raises: as `entries`."""
        ...

    def columns(self) -> list[str]:
        """Returns names of the rows' columns; empty for task folders."""
        ...


def entry_of(values: Mapping[str, Any], place: FaultPlace, language: str | None) -> TaskEntry:
    """Returns the entry of a row. language: of the dataset, when the row has no language column.

    Raises: DatasetInvalid: a name that no task can have, or an invalid date.
    """
    organisation, repository = values.get("org"), values.get("repo")
    if isinstance(organisation, str) and isinstance(repository, str):
        repository = f"{organisation}/{repository}"
    name = values.get("instance_id")
    if name in (None, "") and isinstance(organisation, str) and isinstance(values.get("number"), int):
        name = f"{organisation}__{values['repo']}-{values['number']}"  # as Multi-SWE-bench builds it
    if not isinstance(name, str) or not name.strip():
        raise place.fault("instance_id", "a text that is not empty", name)
    if not _NAME.fullmatch(name) or ".." in name.split("/"):
        raise place.fault("instance_id", "at most 200 letters, digits, and ._/+- after the first", name)
    language_name = next((values[key] for key in LANGUAGE_COLUMNS if values.get(key)), language)
    return TaskEntry(
        name=name,
        repository=repository if isinstance(repository, str) else None,
        language=language_name.lower() if isinstance(language_name, str) else None,
        created_at=_date(values.get("created_at"), place),
    )


_NAME = re.compile(NAME)


def _date(found: Any, place: FaultPlace) -> datetime | None:
    """Reads a date from ISO 8601, or seconds or milliseconds since 1970; UTC when it has no zone."""
    if found is None or found == "":
        return None
    try:
        if isinstance(found, int | float) and not isinstance(found, bool):
            return datetime.fromtimestamp(found / 1000 if found > 1e11 else found, UTC)
        at = datetime.fromisoformat(found)
    except (ValueError, TypeError, OverflowError, OSError) as error:
        raise place.fault("created_at", "a date such as 2024-05-31T12:00:00Z", found) from error
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


def fault_of(error: Exception, where: str) -> DatasetFault:
    """Returns the fault that `lint` reports for an error of a row or a folder."""
    place, field = (error.where, error.field) if isinstance(error, DatasetInvalid) else ("", "")
    return DatasetFault(place or where, field, str(error))


def refusal(dataset: str, faults: Sequence[Exception], count: int) -> Exception:
    """Returns the error of a dataset with bad rows: the only fault itself, or the first ones and their number."""
    if count == 1:
        return faults[0]
    lines = "".join(f"\n  {fault}" for fault in faults[:FIRST_FAULTS])
    more = f"\n  and {count - FIRST_FAULTS} more" if count > FIRST_FAULTS else ""
    return DatasetInvalid(
        f"dataset {dataset}: expected every row to be well formed; found {count} that cannot be read;"
        f" `megaflow dataset lint` names every fault:{lines}{more}"
    )
