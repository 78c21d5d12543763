"""Lists the grading libraries of datasets, by judge: each with its own lock file and a script that serves it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app.models.spec import JudgeName

_HERE = Path(__file__).parent
RESIDENT = _HERE / "resident.py"
"""Program that serves any of them; it runs in the library's environment and imports nothing of MegaFlow."""


@dataclass(frozen=True, slots=True)
class LibraryFiles:
    """Files that one library is installed from and served by."""

    name: str  # name of its environment on a host
    lock: Path
    script: Path


def _files(folder: str) -> LibraryFiles:
    place = _HERE / folder
    return LibraryFiles(f"grading-{folder.replace('_', '-')}", place / "requirements.lock", place / "judge.py")


LIBRARIES: Mapping[JudgeName, LibraryFiles] = {
    JudgeName.SWEBENCH_4: _files("swebench_4"),
    JudgeName.SWEBENCH_5: _files("swebench_5"),
    JudgeName.MULTI_SWE_BENCH: _files("multi_swe_bench"),
    JudgeName.SWESMITH: _files("swesmith"),
}
