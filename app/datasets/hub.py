"""Fetches a dataset's files from a hub, with `huggingface_hub` and its own cache.

HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME and HF_TOKEN are its settings and have its meanings. Tested with a loopback server
that answers like the hub; never with the real one.

Source: huggingface_hub 1.33, `snapshot_download`.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

from app.datasets.catalogue import KnownDataset
from app.errors import DatasetUnavailable, DependencyMissing, UnknownName


def fetch(dataset: KnownDataset, revision: str | None) -> tuple[Path, tuple[Path, ...]]:
    """Returns the files of the dataset's split at a revision (a branch, a tag, a commit; None: the default branch).

    They are below a folder of the hub's cache that has the commit's name. Cached files are not requested again;
    offline, only they are available.

    Raises: UnknownName: no such dataset or revision there, or a dataset that no hub has; DatasetUnavailable: no answer,
        a login is needed, or offline and not in the cache; DependencyMissing.
    """
    if dataset.hub_id is None:
        raise UnknownName(
            f"dataset {dataset.name}: expected it on a hub, but its makers put it on none; {_fix(dataset)}"
        )
    folder = _snapshot(dataset, dataset.hub_id, revision)
    files = files_of(folder, dataset)
    if not files:
        raise DatasetUnavailable(
            f"dataset {dataset.name}: expected files {' or '.join(dataset.patterns())} in {dataset.hub_id} at"
            f" {folder.name[:12]}, found none; {_fix(dataset)}"
        )
    return folder, files


def files_of(folder: Path, dataset: KnownDataset) -> tuple[Path, ...]:
    """Returns the files of the dataset's split in a folder with the hub's layout, sorted by path."""
    patterns = dataset.patterns()
    below = ((path, path.relative_to(folder).as_posix()) for path in sorted(folder.rglob("*")) if path.is_file())
    return tuple(path for path, name in below if any(_matches(name, pattern) for pattern in patterns))


def _matches(path: str, pattern: str) -> bool:
    return path.count("/") == pattern.count("/") and fnmatchcase(path, pattern)  # `*` does not match a `/`


def _fix(dataset: KnownDataset) -> str:
    return f"give a local copy as {dataset.name}=PATH"


def _snapshot(dataset: KnownDataset, hub_id: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
        from huggingface_hub.errors import HTTPError as AnyHttpError  # type: ignore[attr-defined]
    except ModuleNotFoundError as error:
        raise DependencyMissing(
            f"dataset {dataset.name}: expected the package huggingface_hub, which asks the hub, found none;"
            f" try `pip install 'megaflow[datasets]'`, or {_fix(dataset)}"
        ) from error
    at = f"{hub_id}@{revision}" if revision else hub_id
    try:
        folder = snapshot_download(
            hub_id, repo_type="dataset", revision=revision, allow_patterns=list(dataset.patterns())
        )
    except GatedRepoError as error:
        raise _unavailable(dataset, f"access to {at} without a login", error, "set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise UnknownName(f"dataset {dataset.name}: expected {at} on the hub; found none; {_fix(dataset)}") from error
    except (RevisionNotFoundError, HFValidationError) as error:
        raise UnknownName(
            f"dataset {dataset.name}: expected a branch, a tag or a commit of {hub_id}; found {revision!r}"
        ) from error
    except (LocalEntryNotFoundError, AnyHttpError, OSError, ValueError) as error:
        raise _unavailable(dataset, f"{at} from the hub or in its cache", error, _fix(dataset)) from error
    return Path(folder)


def _unavailable(dataset: KnownDataset, expected: str, error: Exception, fix: str) -> DatasetUnavailable:
    problem = " ".join(str(error).removeprefix("Got: ").split())[:300]
    return DatasetUnavailable(f"dataset {dataset.name}: expected {expected}; found {problem}; {fix}")
