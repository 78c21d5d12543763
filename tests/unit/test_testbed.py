"""`make test` runs every test once, and a failed one fails it."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

_FILE = Path(__file__).parents[2] / "scripts" / "testbed.py"
_PLAIN = ["-n", "0"]


@pytest.fixture
def testbed() -> ModuleType:
    """`scripts/testbed.py`, which no package has."""
    spec = spec_from_file_location("testbed", _FILE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of its own to test in."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_failed_test_is_run_once_and_is_a_failure(testbed: ModuleType, elsewhere: Path) -> None:
    body = "def test_it():\n    with open('runs', 'a') as f:\n        f.write('x')\n    assert False\n"
    (elsewhere / "test_it.py").write_text(body)
    assert testbed._run(_PLAIN) == 1
    assert (elsewhere / "runs").read_text() == "x"


def test_no_tests_at_all_is_no_success(testbed: ModuleType, elsewhere: Path) -> None:
    assert testbed._run(_PLAIN) == 5
