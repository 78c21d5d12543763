"""The folder of a local environment: what is in it, what its commands are told, how it is copied and ended."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from app.environments.runtimes.local.processes import kill_marked
from app.errors import DiskFull, EnvironmentFailed
from app.host.disk import no_space
from app.models.instance import MARK
from app.models.spec import EnvironmentSpec

ENVIRONMENT = "_MF_ENVIRONMENT"
"""Variable that marks every process of one environment."""
OWNER = "owner.json"
"""File beside the folder of an environment that says whose it is."""
_FOLDERS = {"TESTS_DIR": "tests", "LOGS_DIR": "logs", "SOLUTION_DIR": "solution"}
_YOUNG_S = 60.0
"""So long a folder is taken for one that is being made."""


def variables_of(root: Path, spec: EnvironmentSpec) -> dict[str, str]:
    """The whole environment of a command: small, and nothing of the worker's own but the mark of its instance.

    By that mark, the launcher of a worker that was killed ends at once what it left running.
    """
    marks = {MARK: os.environ[MARK]} if MARK in os.environ else {}
    folders = {name: str(root / folder) for name, folder in _FOLDERS.items()}
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(root / "root"),
        "TMPDIR": str(root / "tmp"),
        "LANG": "C.UTF-8",
        "WORKDIR": str(root / spec.workdir.lstrip("/")),
        **folders,
        "MEGAFLOW_ROOT": str(root),
        **spec.env,
        **marks,
    }


def lay_out(root: Path, spec: EnvironmentSpec) -> None:
    """Make the folders that a task may expect."""
    for name in (*_FOLDERS.values(), "root", "tmp", spec.workdir.lstrip("/")):
        (root / name).mkdir(parents=True, exist_ok=True)


def copy(tree: Path, root: Path, deadline: float) -> None:
    """Copy a prepared tree with modes, times and links.

    Raises: DiskFull, EnvironmentFailed.
    """
    left_s = max(0.1, deadline - time.monotonic())
    try:
        # The system's own copy: faster than ours, and it may share blocks.
        argv = ["/bin/cp", "-a", str(tree), str(root)]
        subprocess.run(argv, check=True, capture_output=True, timeout=left_s)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFailed(f"copying {tree} took longer than the environment's time.") from error
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode("utf-8", "replace").strip()
        if no_space(reason):
            raise DiskFull(f"no space for an environment: {reason}; free some under MEGAFLOW_HOME.") from error
        raise EnvironmentFailed(f"{tree} could not be copied: {reason}") from error


def installation_of(folder: Path) -> str | None:
    """Whose it is; None while, or since, it does not say."""
    try:
        return str(json.loads((folder / OWNER).read_text())["megaflow"])
    except (OSError, ValueError, KeyError):
        return None


def nobodys(home: Path) -> list[Path]:
    """What a maker left that was killed before it could say whose it is, or somebody amid its end; old ones alone."""
    found = []
    for folder in (home / "local").glob("*"):
        with suppress(OSError):  # going
            if installation_of(folder) is None and time.time() - folder.stat().st_mtime > _YOUNG_S:
                found.append(folder)
    return found


def end(folder: Path) -> None:
    """Kill everything marked with the folder's environment and remove it.

    Raises: EnvironmentFailed: some of it is there yet.
    """
    kill_marked(ENVIRONMENT, folder.name)
    remove(folder)


def remove(folder: Path) -> None:
    """Remove a folder, also what its owner may not write to; what cannot be removed stays."""
    for _ in range(5):  # a dying process may still have written
        with suppress(OSError):  # somebody else removes it, too; or it would not go
            if _emptied(folder):
                shutil.rmtree(folder, onerror=_make_writable)
        if not folder.exists():
            return
        time.sleep(0.05)
    raise EnvironmentFailed(f"expected {folder} to be gone, found some of it there yet; the sweeper goes on trying.")


def _emptied(folder: Path) -> bool:
    """Whether all has gone but the word whose it is, without which no sweeper would find the rest."""
    os.chmod(folder, 0o700)
    for path in [path for path in folder.iterdir() if path.name != OWNER]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, onerror=_make_writable)
        else:
            path.unlink()
    return {path.name for path in folder.iterdir()} <= {OWNER}


def _make_writable(function: Callable[[str], object], path: str, _: object) -> None:
    with suppress(OSError):
        os.chmod(os.path.dirname(path), 0o700)
        os.chmod(path, 0o700)
        function(path)
