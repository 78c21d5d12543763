"""The compatibility matrix in small, on every change: three datasets whose rules are far apart, and one framework."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.conftest import System
from tests.matrix.fixture import KINDS, Fixture, Kind
from tests.matrix.fixtures import all_fixtures
from tests.matrix.run import OURS, Matrix, build_all, remove_all

pytestmark = [pytest.mark.docker, pytest.mark.timeout(400)]

DATASETS = ("swe-smith", "multi-swe-bench", "terminal-bench")


@pytest.fixture(scope="module")
def fixtures(system: System) -> Iterator[list[Fixture]]:
    chosen = [one for one in all_fixtures() if one.dataset in DATASETS]
    build_all(chosen, system.settings)
    yield chosen
    remove_all(chosen, system.settings)


@pytest.mark.extra
def test_answers_get_the_verdicts_that_were_derived_by_hand(
    system: System, fixtures: list[Fixture], tmp_path: Path
) -> None:
    matrix = Matrix(system.flow, tmp_path, lambda _: None)
    for number, fixture in enumerate(fixtures):
        matrix.submit(fixture, number, OURS, KINDS)
    matrix.wait(300)
    assert len(matrix.records) == len(DATASETS) * len(OURS) * len(KINDS)
    assert [record for record in matrix.records if not record.as_expected] == []


@pytest.mark.extra  # `make matrix` runs it for all
@pytest.mark.agents
def test_a_framework_solves_the_task_and_the_peculiar_one(
    system: System, fixtures: list[Fixture], tmp_path: Path
) -> None:
    matrix = Matrix(system.flow, tmp_path, lambda _: None)
    matrix.submit(fixtures[0], 0, ("claude-code",), (Kind.RIGHT, Kind.PECULIAR))
    matrix.wait(300)
    assert [(one.reward, one.end_reason, one.mode) for one in matrix.records] == [
        (1.0, "submitted", "ephemeral"),
        (1.0, "submitted", "persistent"),
    ]
    assert all(one.artifacts["patch"] and one.artifacts["trajectory"] for one in matrix.records)
