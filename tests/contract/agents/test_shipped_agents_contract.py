"""The agents' contract as others run it: by pytest's own command line, on an adapter outside of this repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.agents.example import EXAMPLE

BARE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # of the plugins that are installed, which take seconds to import


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    shutil.copytree(EXAMPLE.parent, tmp_path / "adapter")
    return tmp_path


def suite(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "pytest", "-p", "megaflow.contract.agents.plugin", "-p", "no:cacheprovider", "-q"]
    return subprocess.run(
        [*command, "--pyargs", "megaflow.contract.agents", "--tools", str(folder / "tools"), *words],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(root), **BARE},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.extra
def test_it_runs_on_an_adapter_of_somebody_elses(elsewhere: Path) -> None:
    done = suite(elsewhere, "--agent", "adapter/agent.toml", "-k", "solves or turns")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


@pytest.mark.extra
def test_it_fails_on_one_that_does_not_keep_it(elsewhere: Path) -> None:
    """An adapter that leaves a file of its own in the repository, and calls a broken endpoint an end of its turns."""
    script = elsewhere / "adapter" / "agent.py"
    changed = script.read_text().replace('"model_error"', '"step_limit"')
    changed = changed.replace("def work(messages):", 'ask_bridge(command="touch mine.log")\n\n\ndef work(messages):')
    script.write_text(changed)
    done = suite(elsewhere, "--agent", "adapter/agent.toml", "-k", "solves or (never_answers and broken)")
    assert done.returncode == 1
    assert "2 failed" in done.stdout


def test_without_an_agent_or_with_a_wrong_one_it_says_what_it_wants(elsewhere: Path) -> None:
    assert "expected --agent NAME" in suite(elsewhere).stdout
    wrong = suite(elsewhere, "--agent", "adapter/absent.toml")
    assert "absent.toml" in wrong.stdout + wrong.stderr
