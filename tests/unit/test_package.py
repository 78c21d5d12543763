"""The names that a producer imports: there when asked for, and no weight for programs that need none of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import megaflow


def test_environments_alone_load_no_database() -> None:
    code = (
        "import sys, app.environments.runtimes.docker.provider;"
        " print([name for name in ('sqlalchemy', 'celery') if name in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.strip() == "[]"


# --- The package megaflow -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", megaflow.__all__)
def test_each_name_of_the_package_megaflow_is_there(name: str) -> None:
    assert getattr(megaflow, name).__module__.startswith("app.")
    assert name in dir(megaflow)


def _beside_another_app(tmp_path: Path, *command: str, module: bool) -> subprocess.CompletedProcess[str]:
    """Run Python where a user's own `app` comes first: a module or a package."""
    other = tmp_path / ("app.py" if module else "app/__init__.py")
    other.parent.mkdir(exist_ok=True)
    other.write_text("NAME = 'a program of the user'\n")
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(megaflow.__file__).parent.parent}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("module", [True, False])
def test_another_app_in_the_way_is_named(tmp_path: Path, module: bool) -> None:
    done = _beside_another_app(tmp_path, "-c", "from megaflow import MegaFlow", module=module)
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith("ImportError: expected MegaFlow's own package app in ")
    assert f"found another app at {tmp_path}" in said


def test_the_command_names_another_app_in_one_line(tmp_path: Path) -> None:
    done = _beside_another_app(tmp_path, "-m", "megaflow", "--help", module=False)
    assert done.returncode == 78
    assert done.stderr.startswith("megaflow: expected MegaFlow's own package app in ")
    assert done.stderr.count("\n") == 1
