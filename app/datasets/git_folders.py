"""Reads task folders of git repositories, at a commit, and the registry files that list them.

A registry names tasks by repository, commit and path: the first Terminal-Bench's by dataset, Harbor's by task. The
commit is fetched once and cached. Tested with repositories on this host; never with a real one.

Source: Terminal-Bench, registry.json; Harbor, registry.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.datasets.catalogue import GitFolder
from app.datasets.faults import FaultPlace, shown
from app.datasets.folder_dataset import TASK_FILES
from app.errors import DatasetInvalid, DatasetUnavailable, SpecInvalid, UnknownName
from app.task_files import inside, read_inside

_COMMIT = re.compile(r"[0-9a-f]{40}")
_MOST_S = 1800.0
_POINTER = b"version https://git-lfs.github.com/spec/"
_MOST_POINTER_BYTES = 1024
_GIT = (
    "git",
    # Only https, and addresses from the user's own `insteadOf`; the repository's hooks and helpers do not run.
    *("-c", "protocol.allow=never", "-c", "protocol.https.allow=always", "-c", "protocol.file.allow=always"),
    *("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "advice.detachedHead=false"),
)


@dataclass(frozen=True, slots=True)
class RegisteredDataset:
    """A dataset of a registry: its task folders, in git or next to the registry."""

    name: str
    version: str
    parts: tuple[tuple[GitFolder | Path, tuple[str, ...]], ...]  # a folder, and the names of folders in it; none: all

    @property
    def label(self) -> str:
        """The name for a submission."""
        return f"{self.name}@{self.version}"


def checkout(where: GitFolder, cache: Path | None) -> Path:
    """Returns the folder, below `cache`; fetches it if it is missing.

    Raises: DatasetInvalid: no https address, no whole commit, no such folder; DatasetUnavailable: git cannot fetch it.
    """
    if not where.url.startswith("https://") or not _COMMIT.fullmatch(where.commit):
        raise DatasetInvalid(
            f"expected an https:// address and a commit of 40 hex digits, as the same tasks could not be had again"
            f" otherwise; found {shown(where.url)} at {shown(where.commit)}"
        )
    if cache is None:
        raise DatasetUnavailable(f"expected a folder for the tasks of {where.url}; found none; give a local copy")
    home = cache / f"{where.commit}-{hashlib.sha256(where.url.encode()).hexdigest()[:12]}"
    if not home.is_dir():
        _fetch(where, home)
    folder = inside(home, home / where.folder)
    if not folder.is_dir():
        raise DatasetInvalid(f"{where.url} at {where.commit[:12]}: expected a folder {where.folder!r}; found none")
    return folder


def refuse_pointers(folder: Path) -> None:
    """Raises: DatasetInvalid: a file is only a Git LFS pointer, whose content was not fetched."""
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_file() or path.stat().st_size > _MOST_POINTER_BYTES:
            continue
        with path.open("rb") as file:
            if file.read(len(_POINTER)) == _POINTER:
                raise DatasetInvalid(
                    f"{path}: expected the file itself; found what stands for it in Git LFS, which is not fetched;"
                    " clone the repository with git lfs and give NAME=PATH"
                )


def _fetch(where: GitFolder, home: Path) -> None:
    """Fetches into a folder next to `home`, then renames it to `home`, so that half a checkout is never read."""
    home.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix="fetching-", dir=home.parent))
    try:
        _git(draft, "init", "--quiet")
        _git(draft, "fetch", "--quiet", "--depth", "1", "--no-tags", where.url, where.commit)
        commit = _git(draft, "rev-parse", "FETCH_HEAD").strip()
        if commit != where.commit:
            raise DatasetInvalid(f"{where.url}: expected commit {where.commit}; found {shown(commit)}")
        _git(draft, "checkout", "--quiet", "--detach", where.commit)
        draft.rename(home)
    except OSError as error:
        if not home.is_dir():  # otherwise another process was faster
            raise DatasetUnavailable(f"{home}: expected to keep {where.url} there; found {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _git(folder: Path, *arguments: str) -> str:
    env = {name: value for name, value in os.environ.items() if name not in ("GIT_DIR", "GIT_WORK_TREE")}
    env |= {"GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1"}
    try:
        result = subprocess.run(  # noqa: S603
            [*_GIT, "-C", str(folder), *arguments],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_MOST_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise DatasetUnavailable("expected the program git, which fetches task folders; found none") from error
    except subprocess.TimeoutExpired as error:
        raise DatasetUnavailable(f"expected git {arguments[0]} to end within {_MOST_S:.0f} s; it did not") from error
    if result.returncode:
        message = " ".join(result.stderr.decode("utf-8", "replace").split())[:300]
        raise DatasetUnavailable(f"expected git {arguments[0]} to fetch the tasks; found: {message}; give a local copy")
    return result.stdout.decode("utf-8", "replace")


def is_registry(file: Path) -> bool:
    """Whether a file is a list of datasets. Reads it if it is a .json; never raises for other files."""
    if file.suffix != ".json" or not file.is_file():
        return False
    try:
        entries = json.loads(read_inside(file.parent, file))
    except (OSError, ValueError, RecursionError, SpecInvalid):
        return False
    first = entries[0] if isinstance(entries, list) and entries else None
    return isinstance(first, dict) and "instance_id" not in first and bool({"dataset_path", "tasks"} & first.keys())


def registered(file: Path, wanted: str | None) -> RegisteredDataset:
    """Returns the requested dataset of a registry: NAME or NAME@VERSION; None: its only one.

    Raises: DatasetInvalid: a malformed entry; UnknownName: none of that name, or several to choose from.
    """
    entries = json.loads(read_inside(file.parent, file))
    datasets = [_entry(file, number, one) for number, one in enumerate(entries, start=1)]
    name, _, version = (wanted or "").partition("@")
    fitting = [one for one in datasets if (not name or one.name == name) and (not version or one.version == version)]
    if len(fitting) != 1:
        labels = sorted({one.label for one in fitting or datasets})
        raise UnknownName(
            f"{file}: expected one dataset of the registry; found {wanted or 'no choice'!r};"
            f" name one: {labels[0]}={file}; known: {', '.join(labels[:20])}"
        )
    return fitting[0]


def _entry(file: Path, number: int, found: Any) -> RegisteredDataset:
    place = FaultPlace(f"{file}, entry {number}")
    if not isinstance(found, dict):
        raise DatasetInvalid(f"{place.where}: expected a JSON object; found {shown(found)}")
    name, version = _text(found, "name", place), _text(found, "version", place)
    if "tasks" in found:
        return RegisteredDataset(name, version, _of_tasks(file, found["tasks"], place))
    folder = _text(found, "dataset_path", place)
    subset = found.get("task_id_subset") or ()
    if not isinstance(subset, list | tuple) or not all(isinstance(one, str) and one for one in subset):
        raise place.fault("task_id_subset", "a list of names", subset)
    where = _folder(file, found.get("github_url"), found.get("commit_hash"), folder, place)
    return RegisteredDataset(name, version, ((where, tuple(subset)),))


def _of_tasks(file: Path, tasks: Any, place: FaultPlace) -> tuple[tuple[GitFolder | Path, tuple[str, ...]], ...]:
    """Reads Harbor's entries: each task has its own location; those of one repository and commit become one part."""
    if not isinstance(tasks, list) or not all(isinstance(one, dict) for one in tasks):
        raise place.fault("tasks", "a list of tasks", tasks)
    parts: dict[GitFolder | Path, list[str]] = {}
    for task in tasks:
        where = _folder(file, task.get("git_url"), task.get("git_commit_id"), ".", place)
        parts.setdefault(where, []).append(_text(task, "path", place))
    return tuple((where, tuple(paths)) for where, paths in parts.items())


def _folder(file: Path, url: Any, commit: Any, folder: str, place: FaultPlace) -> GitFolder | Path:
    if url is None:
        return inside(file.parent, file.parent / folder)
    if not isinstance(url, str) or not url.startswith("https://"):
        raise place.fault("url", "an https:// address", url)
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise place.fault("commit", "40 hex digits, without which the same tasks could not be had again", commit)
    return GitFolder(url if url.endswith(".git") else f"{url.rstrip('/')}.git", commit, folder)


def _text(found: dict[str, Any], field: str, place: FaultPlace) -> str:
    value = found.get(field)
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise place.fault(field, "a text that is not empty", value)
    return value


def folders_of(dataset: RegisteredDataset, cache: Path | None) -> Sequence[Path]:
    """Returns every task folder, fetched if missing. Raises: as `checkout`; DatasetInvalid: a folder is missing."""
    folders: list[Path] = []
    for where, names in dataset.parts:
        root = checkout(where, cache) if isinstance(where, GitFolder) else where
        inside_it = sorted(child for child in root.iterdir() if not child.name.startswith("."))
        chosen = names or tuple(child.name for child in inside_it if any((child / one).is_file() for one in TASK_FILES))
        for name in chosen:
            folder = inside(root, root / name)
            if not folder.is_dir():
                raise DatasetInvalid(f"dataset {dataset.label}: expected a task folder {name!r} in {root}; found none")
            if isinstance(where, GitFolder):
                refuse_pointers(folder)
            folders.append(folder)
    return folders
