"""The script that makes the environment of Python."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_an_environment_behind_a_link_is_not_emptied(tmp_path: Path) -> None:
    for name in ("scripts", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / "worktree" / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "worktree")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "kept").touch()
    (tmp_path / "worktree" / "linked").symlink_to(tmp_path / "other")
    done = subprocess.run(
        ["sh", tmp_path / "worktree" / "scripts" / "bootstrap"],
        env={**os.environ, "VENV": "linked"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 73, done.stderr
    assert "linked is a link to another checkout's environment" in done.stderr
    assert (tmp_path / "other" / "kept").exists()
