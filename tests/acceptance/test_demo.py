"""What the demo does for its environments' sake, on a real system: every path that it then calls certain is taken."""

from __future__ import annotations

import pytest

from app.cli import demo
from app.cli.demo_seen import seen_of, unexpected_paths
from app.models.spec import EnvironmentKind
from app.workers import evaluations
from tests.acceptance.conftest import System

pytestmark = [pytest.mark.docker, pytest.mark.timeout(400)]


def test_replicas_share_a_set_up_used_ones_are_used_again_and_an_allowlist_is_kept(system: System) -> None:
    tasks = evaluations.demo_tasks(system.settings, EnvironmentKind.DOCKER)
    runs = demo._again(system.flow, tasks)
    found = {name: run.results(timeout=300) for name, run in runs.items()}
    assert {(name, one.reward) for name, results in found.items() for one in results} == {(name, 1.0) for name in runs}
    results = [one for ended in found.values() for one in ended]
    seen = seen_of(results)
    assert unexpected_paths(seen, fresh=runs[demo._FRESH_RUN].id) == []
    assert {one.network for one in seen} == {"none", "allowlist"}
    for one in results:
        assert one.attempt is not None
        told = one.attempt.environment
        assert sum(told["phases"].values()) == pytest.approx(told["ready_s"], abs=0.001)
        assert one.reward == demo.EXPECTED[one.agent]
    paid = [one.attempt.environment["phases"].get("set_up", 0.0) for one in found["demo-set-up"] if one.attempt]
    assert sum(s > 1.0 for s in paid) <= 1
