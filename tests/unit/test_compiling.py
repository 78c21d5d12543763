"""Programs in C: compiled once for each source, header and set of flags."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from app.environments import compiling
from tests.services import missing


@pytest.fixture
def source(tmp_path: Path) -> Path:
    if compiling.find() is None or shutil.which("cc") is None:
        missing("a C compiler")
    (tmp_path / "answer.h").write_text("#define ANSWER 42\n")
    (tmp_path / "x.c").write_text('#include "answer.h"\nint main(void) { return ANSWER + MORE; }\n')
    return tmp_path / "x.c"


def _kept(source: Path, more: int) -> Path:
    compiling._key.cache_clear()
    return compiling.kept(source.parent / "made" / "x", [source], (*compiling.STATIC, f"-DMORE={more}"))


def _code(program: Path) -> int:
    return subprocess.run([program], check=False).returncode


def test_what_was_compiled_is_kept(source: Path) -> None:
    first = _kept(source, 0)
    made = first.stat()
    assert _code(first) == 42
    assert _kept(source, 0) == first
    assert (first.stat().st_ino, first.stat().st_mtime_ns) == (made.st_ino, made.st_mtime_ns)
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_another_flag_source_or_header_is_another_program(source: Path) -> None:
    programs = {_kept(source, 0), _kept(source, 1)}
    source.write_text(source.read_text() + "int unused;\n")
    programs.add(_kept(source, 0))
    (source.parent / "answer.h").write_text("#define ANSWER 43\n")
    programs.add(_kept(source, 0))
    assert sorted(_code(program) for program in programs) == [42, 42, 43, 43]


def test_musl_is_taken_where_it_is_and_what_it_made_also_where_it_is_not(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("musl-gcc") is None:
        missing("musl's compiler (Debian: musl-tools)")
    with monkeypatch.context() as without:
        without.setattr(compiling, "_musl", lambda flags: None)
        plain = _kept(source, 0)
    small = _kept(source, 0)
    assert plain != small
    assert small.stat().st_size < plain.stat().st_size / 4
    assert (_code(plain), _code(small)) == (42, 42)
    monkeypatch.setattr(compiling, "_musl", lambda flags: pytest.fail("asked again"))
    assert _kept(source, 0) == small


def test_what_musl_cannot_compile_another_compiler_can(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_musl", lambda flags: shutil.which("false"))
    assert _code(_kept(source, 0)) == 42
    assert len(list((source.parent / "made").iterdir())) == 1


def test_a_compiler_that_refuses_is_quoted_and_leaves_nothing(source: Path) -> None:
    source.write_text("int main(void) { return nothing; }\n")
    with pytest.raises(compiling.NotCompiled, match="nothing"):
        _kept(source, 0)
    assert list((source.parent / "made").iterdir()) == []


def test_without_a_compiler_the_packages_are_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(compiling.NotCompiled, match="gcc and libc6-dev"):
        _kept(source, 0)
