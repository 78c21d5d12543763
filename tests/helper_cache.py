"""One compiled session helper for all tests: every home of a test would else compile its own (2 s of CPU each)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from app.environments import compiling


@pytest.fixture(scope="module", autouse=True)
def _one_session_helper(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep it in pytest's own cache, too, and copy from there.

    Unit tests are left out: some try the compiling itself. So are programs that know their home by their flags.
    """
    if request.path.is_relative_to(Path(__file__).parent / "unit") or request.config.cache is None:
        yield
        return
    cache, compile_ = request.config.cache.mkdir("programs"), compiling.kept

    def copied(path: Path, sources: Sequence[Path], flags: Sequence[str] = compiling.STATIC) -> Path:
        if tuple(flags) != compiling.STATIC:
            return compile_(path, sources, flags)
        made = compile_(cache / path.name, sources, flags)
        copy = path.with_name(made.name)
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            passing = copy.with_name(f".{copy.name}-{id(copy)}")
            shutil.copy(made, passing)
            passing.replace(copy)
        return copy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "kept", copied)
        yield
