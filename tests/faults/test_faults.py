"""Planted faults: each patch here breaks one promise, and the tests that it names must notice.

A patch begins with what it breaks and `Tests:` with arguments of pytest; the difference follows. Apply one by hand with
`git apply tests/faults/NAME.patch`, and take it back with `git apply -R`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCHES = sorted(Path(__file__).parent.glob("*.patch"))
_NEEDED = ("app", "megaflow", "tests", "migrations", "scripts", "pyproject.toml", "alembic.ini")


def arguments_of(patch: Path) -> list[str]:
    """The arguments of pytest that the patch names."""
    line = next(line for line in patch.read_text().splitlines() if line.startswith("Tests: "))
    return shlex.split(line.removeprefix("Tests: "))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_patch_fits(patch: Path) -> None:
    subprocess.run(["git", "apply", "--check", str(patch)], cwd=ROOT, check=True, timeout=30)
    assert all((ROOT / one).exists() for one in arguments_of(patch) if one.startswith("tests/"))


@pytest.mark.extra
@pytest.mark.timeout(900)
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_fault_is_caught(patch: Path, tmp_path: Path) -> None:
    for name in _NEEDED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    subprocess.run(["git", "apply", str(patch)], cwd=tmp_path, check=True, timeout=30)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments_of(patch)]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=850)
    # 2 and more mean that pytest could not run what was asked for.
    assert done.returncode == 1, f"{patch.stem} was not noticed:\n{done.stdout[-3000:]}"
