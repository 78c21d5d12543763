"""The session helper reads broken requests and archives without touching memory that is not its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.environments.session.protocol import FrameKind, field, frame
from tests.security.fuzzed_helper import Target, built, frames, fuzz, put_tree, running

TARGETS = pytest.mark.parametrize("make", [put_tree, frames], ids=["archives", "frames"])


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("sanitized"))


@pytest.fixture
def target(program: Path, tmp_path: Path) -> Iterator[Target]:
    with running(program, tmp_path) as found:
        yield found


@TARGETS
def test_broken_input_is_refused(target: Target, make: Callable[[random.Random], bytes]) -> None:
    assert fuzz(target, make, seed=19, seconds=0, least=400) == 400


@pytest.mark.extra
@pytest.mark.timeout(900)
@TARGETS
def test_much_broken_input_is_refused(target: Target, make: Callable[[random.Random], bytes]) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}: {fuzz(target, make, seed=seed, seconds=300, least=1000)} cases")


@pytest.mark.parametrize("path", [b"", b"/", b"x"])
def test_a_path_without_folders_is_read_to_its_end_only(target: Target, path: bytes) -> None:
    target.send(frame(FrameKind.PUT, bytes(4) + field(path)) + frame(FrameKind.END))
