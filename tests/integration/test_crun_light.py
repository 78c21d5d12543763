"""crun without systemd's library: the same program, with fewer to load; where that cannot be, as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from app.environments import crun
from tests.services import missing


@pytest.fixture
def program() -> Path:
    found = crun.find()
    if found is None or shutil.which("cc") is None or shutil.which("readelf") is None:
        missing("crun and a compiler")
    libraries = subprocess.run(["ldd", found], capture_output=True, text=True, check=False).stdout
    if "libsystemd" not in libraries:
        pytest.skip("this crun has nothing to do with systemd")
    return found.resolve()


def _loaded(program: Path, folder: Path) -> set[str]:
    command = ["ldd", str(program)]
    told = subprocess.run(command, check=True, capture_output=True, text=True, env=_with(folder)).stdout
    return {line.split()[0] for line in told.splitlines()}


def _with(folder: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(folder)}


def test_it_says_the_same_with_fewer_libraries(program: Path, tmp_path: Path) -> None:
    folder = crun.light(program, tmp_path)
    assert folder is not None
    assert folder.is_relative_to(tmp_path)
    light, whole = _loaded(program, folder), _loaded(program, tmp_path / "nothing")
    assert light < whole
    assert not any("gcrypt" in name for name in light)
    command = [program, "--version"]
    assert subprocess.check_output(command, env=_with(folder)) == subprocess.check_output(command)


def test_it_is_made_once_and_by_whoever_comes_first(program: Path, tmp_path: Path) -> None:
    told = "import sys, pathlib, app.environments.crun as c; print(c.light(*map(pathlib.Path, sys.argv[1:])))"
    command = [sys.executable, "-c", told, str(program), str(tmp_path)]
    at_once = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    found = {process.communicate(timeout=60)[0].splitlines()[-1] for process in at_once}
    assert len(found) == 1
    (folder,) = found
    made = (Path(folder) / "libsystemd.so.0").stat()
    assert str(crun.light(program, tmp_path)) == folder
    assert (Path(folder) / "libsystemd.so.0").stat() == made
    assert [path.name for path in Path(folder).parent.iterdir()] == [Path(folder).name], "nothing half made is left"


def test_another_program_needs_none(tmp_path: Path) -> None:
    assert crun.light(Path("/bin/sh").resolve(), tmp_path) is None


def test_without_a_compiler_it_is_loaded_as_it_is(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "readelf").symlink_to(str(shutil.which("readelf")))
    monkeypatch.setenv("PATH", str(tools))
    cache = tmp_path / "cache"
    assert crun.light(program, cache) is None
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("loosened", [".", "libsystemd.so.0"])
def test_what_others_may_have_written_is_not_loaded(program: Path, tmp_path: Path, loosened: str) -> None:
    folder = crun.light(program, tmp_path)
    assert folder is not None
    (folder / loosened).chmod(0o777)
    crun._light.cache_clear()
    assert crun.light(program, tmp_path) is None


def test_an_upgraded_crun_gets_its_own(program: Path, tmp_path: Path) -> None:
    copy = tmp_path / "crun"
    shutil.copyfile(program, copy)
    copy.chmod(0o755)
    first = crun.light(copy, tmp_path)
    os.utime(copy, (1, 1))
    assert crun.light(copy, tmp_path) not in (None, first)
