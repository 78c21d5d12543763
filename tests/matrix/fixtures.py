"""All fixtures: the ten datasets of the paper's table 1 in its order, then the others that are known by name."""

from __future__ import annotations

from collections.abc import Callable

from tests.matrix.fixture import Fixture
from tests.matrix.folders import terminal_bench, terminal_bench_2
from tests.matrix.repository import Patches, prepared
from tests.matrix.rows_languages import (
    multi_swe_bench,
    multi_swe_rl,
    multilingual,
    swe_bench_live,
    swe_bench_pro,
    swe_rebench_v2,
)
from tests.matrix.rows_python import own, swe_bench, swe_flow, swe_gym, swe_rebench, swe_smith, verified

_MAKERS: tuple[Callable[[Patches], Fixture], ...] = (
    swe_bench,
    swe_gym,
    swe_rebench,
    swe_smith,
    multilingual,
    multi_swe_bench,
    multi_swe_rl,
    swe_bench_live,
    swe_flow,
    terminal_bench,
    verified,
    swe_rebench_v2,
    swe_bench_pro,
    terminal_bench_2,
    own,
)


def all_fixtures() -> list[Fixture]:
    """Made anew: the commits are the same on every machine."""
    patches = prepared(Patches.of)
    return [make(patches) for make in _MAKERS]
