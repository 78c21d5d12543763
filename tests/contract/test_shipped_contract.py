"""The contract suite as others run it: by pytest's own command line, on a fixture outside of this repository."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megaflow.contract import environments as contract

FIXTURES = """
from app.environments import provider_for
from megaflow.contract.environments.fixture import Fixture, tar_of
from app.models.spec import Build, Bundle, EnvironmentKind, EnvironmentSpec

CONTEXT = tar_of({"setup.sh": b"mkdir -p $MEGAFLOW_ROOT/testbed"})
BUILD = Build(context=Bundle(sha256="0" * 64, size_bytes=len(CONTEXT)))
SPEC = EnvironmentSpec(kind=EnvironmentKind.LOCAL, build=BUILD, env={"GIVEN": "by the task"})

def fixture(kind):
    return Fixture(
        "mine", kind, lambda settings: provider_for(EnvironmentKind.LOCAL, settings, lambda bundle: CONTEXT),
        lambda request: SPEC, isolates=False,
    )

FIXTURES, WRONG = fixture("local"), [fixture("something else")]
"""

BARE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # of the plugins that are installed, which take seconds to import


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    (tmp_path / "my_fixture.py").write_text(FIXTURES)
    return tmp_path


def suite(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    plugins = ["-p", "megaflow.contract.environments.plugin", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugins, "-q"]
    return subprocess.run(
        [*command, "--pyargs", "megaflow.contract.environments", *words],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": f"{folder}:{root}", **BARE},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_it_runs_on_a_fixture_of_somebody_elses(elsewhere: Path) -> None:
    """Nearly all of it: twelve tests that wait for a clock take three times as long as all the others."""
    done = suite(elsewhere, "-vv", "--fixture", "my_fixture", "-k", "not timeout and not background and not flood")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") > 70
    for part in sorted(Path(contract.__file__).parent.glob("test_*.py")):
        assert part.name in done.stdout, "each part was collected"
    assert "test_a_tree_that_leads_outside_is_refused[mine-../outside] PASSED" in done.stdout
    assert "test_a_terminal_has_a_size_that_can_change[mine] PASSED" in done.stdout


def test_it_fails_on_one_that_does_not_keep_it(elsewhere: Path) -> None:
    done = suite(elsewhere, "--fixture", "my_fixture:WRONG", "-k", "description")
    assert done.returncode == 1
    assert "::test_a_description_says_what_it_is" in done.stdout


def test_without_a_fixture_it_says_what_it_wants(elsewhere: Path) -> None:
    assert "--fixture MODULE" in suite(elsewhere).stdout
