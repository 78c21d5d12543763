"""What `make test` does with the few tests that failed: once more, alone, and named."""

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


def _tests(folder: Path, **bodies: str) -> None:
    lines = ["from pathlib import Path"]
    for name, body in bodies.items():
        lines += [f"def test_{name}():", f"    with open({name + '.runs'!r}, 'a') as f:", "        f.write('x')"]
        lines += [f"    {body}"]
    (folder / "test_it.py").write_text("\n".join(lines) + "\n")


def _runs(folder: Path, name: str) -> int:
    return len((folder / f"{name}.runs").read_text())


ONCE = "assert Path('once.runs').read_text() == 'xx'"


def test_what_failed_once_is_run_again_alone_and_named(
    testbed: ModuleType, elsewhere: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _tests(elsewhere, once=ONCE, good="pass")
    assert testbed._run([]) == 0
    assert (_runs(elsewhere, "once"), _runs(elsewhere, "good")) == (2, 1)
    assert "unstable, passed the second time: test_it.py::test_once" in capfd.readouterr().err


def test_what_is_broken_fails_twice(testbed: ModuleType, elsewhere: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _tests(elsewhere, once=ONCE, broken="assert False")
    assert testbed._run(_PLAIN) == 1
    assert (_runs(elsewhere, "once"), _runs(elsewhere, "broken")) == (2, 2)
    assert "they failed again" in capfd.readouterr().err


def test_many_failures_are_not_run_again(testbed: ModuleType, elsewhere: Path) -> None:
    names = [f"broken{number}" for number in range(testbed._MOST_AGAIN + 1)]
    _tests(elsewhere, **dict.fromkeys(names, "assert False"))
    assert testbed._run(_PLAIN) == 1
    assert {_runs(elsewhere, name) for name in names} == {1}


def test_no_tests_at_all_is_no_success(testbed: ModuleType, elsewhere: Path) -> None:
    assert testbed._run(_PLAIN) == 5
