"""What the demo does for its environments' sake, on a real system: every path that it then calls certain is taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from app.cli import demo, demo_by_hand
from app.cli.demo_by_hand import ByHand, by_hand, place
from app.cli.demo_seen import Asked, seen_of, unexpected_paths
from app.environments.engine import engine_of
from app.models.outcome import TaskResult
from app.models.spec import AgentTask, EnvironmentKind, EnvironmentSpec
from app.workers import evaluations
from tests.acceptance.conftest import System
from tests.services import missing

pytestmark = [pytest.mark.docker, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def tasks(system: System) -> list[AgentTask]:
    return evaluations.demo_tasks(system.settings, EnvironmentKind.DOCKER)


@pytest.fixture(scope="module")
def beside(system: System, tasks: list[AgentTask]) -> Iterator[ByHand]:
    """What the demo does by hand, while its registry stands."""
    with ExitStack() as held:
        yield by_hand(system.flow, demo._named(tasks)[demo._REGISTRY], place(system.settings, held), held)


@pytest.fixture(scope="module")
def again(system: System, tasks: list[AgentTask], beside: ByHand) -> dict[str, list[TaskResult]]:
    """What became of the runs, by their names."""
    runs = demo._again(system.flow, tasks, beside)
    return {name: run.results(timeout=300) for name, run in runs.items()}


def test_replicas_share_a_set_up_used_ones_are_used_again_and_an_allowlist_is_kept(
    again: dict[str, list[TaskResult]],
) -> None:
    rewards = {(name, one.reward) for name, results in again.items() for one in results}
    assert rewards == {(name, 0.0 if name == demo._SHARED_RUN else 1.0) for name in again}
    results = [one for ended in again.values() for one in ended]
    seen = seen_of(results)
    fresh, shared = (again[name][0].run_id for name in (demo._FRESH_RUN, demo._SHARED_RUN))
    assert unexpected_paths(seen, Asked(fresh, shared, ahead=False)) == []
    assert {one.network for one in seen} == {"none", "allowlist"}
    for one in results:
        assert one.attempt is not None
        told = one.attempt.environment
        assert sum(told["phases"].values()) == pytest.approx(told["ready_s"], abs=0.001)
        assert one.reward == demo.EXPECTED[one.agent]
    paid = [one.attempt.environment["phases"].get("set_up", 0.0) for one in again["demo-set-up"] if one.attempt]
    assert sum(s > 1.0 for s in paid) <= 1


def test_an_agent_that_changes_nothing_is_lent_an_environment(again: dict[str, list[TaskResult]]) -> None:
    told = [one.attempt.environment for one in again[demo._SHARED_RUN] if one.attempt]
    assert [one.get("shared") for one in told] == [True] * demo._SHARING
    assert all(one.verdict is not None and one.verdict.tests for one in again[demo._SHARED_RUN]), "the tests ran"


def test_what_is_done_by_hand_is_told_and_an_attempt_has_its_image_from_the_registry(
    system: System, beside: ByHand, again: dict[str, list[TaskResult]]
) -> None:
    assert beside.wrong == ()
    assert "snapshot" in beside.did[0]
    if beside.sent is None:
        missing(f"{demo_by_hand.REGISTRY} (Debian: apt-get install {demo_by_hand.REGISTRY})")
    assert beside.sent is not None
    (one,) = again["demo-registry"]
    assert one.attempt is not None
    assert one.attempt.environment["image"] == beside.sent.image
    names = [name for image in engine_of(system.settings).api.images() for name in image["RepoTags"] or ()]
    assert beside.sent.image in names, "it was forgotten when it had been sent: it came back"


def test_without_the_program_the_demo_goes_on_and_says_so(
    system: System, tasks: list[AgentTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_by_hand, "REGISTRY", "no-such-registry")
    with ExitStack() as held:
        found = by_hand(system.flow, demo._named(tasks)["finish-merge"], place(system.settings, held), held)
    assert (found.sent, found.wrong) == (None, ())
    assert "`no-such-registry` is not installed" in found.did[1]
    assert "demo-registry" not in {one.name for one in demo._wanted(system.flow, tasks, found)}


def test_what_does_not_come_about_by_hand_is_an_error_of_the_demo(system: System, tasks: list[AgentTask]) -> None:
    broken = demo._named(tasks)["finish-merge"]
    broken = broken.model_copy(update={"environment": EnvironmentSpec(image="127.0.0.1:1/no/such:image", workdir="/")})
    with ExitStack() as held:
        found = by_hand(system.flow, broken, place(system.settings, held), held)
    assert found.sent is None
    assert all(line.startswith("UNEXPECTED: no ") for line in found.wrong)
    assert "snapshot" in found.wrong[0]
