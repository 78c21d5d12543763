"""Downloads that share links: who is done when, on a clock that is turned by hand."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from app.ledger.attempts import Claim
from app.models.instance import InstanceMode, InstanceRequest
from app.models.outcome import Phase
from app.models.simulation import Simulation
from app.models.spec import Mode
from app.simulation import links
from app.simulation.instances import Attempt, Instance, RandomModel
from app.simulation.links import Links
from tests.building import a_spec, new_id


class Hand:
    """A clock that stands still until it is turned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, Callable[..., None]]] = []

    def call_later(self, delay_s: float, act: Callable[..., None]) -> None:
        self._due.append((self.now + delay_s, act))

    def turn_until(self, end: float) -> None:
        while self._due and min(at for at, _ in self._due) <= end:
            self._due.sort(key=lambda one: one[0])
            self.now, act = self._due.pop(0)
            act()
        self.now = end


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Hand:
    hand = Hand()
    monkeypatch.setattr(links, "time", SimpleNamespace(monotonic=lambda: hand.now))
    return hand


def _instance() -> Instance:
    about = {"mode": InstanceMode.PERSISTENT, "resource_class": "standard", "slots": 4, "lifetime_s": None}
    return Instance(InstanceRequest(instance_id=new_id(), **about), "simulated-1", 1e9)


def _attempt(instance: Instance) -> Attempt:
    deadline_at, spec = datetime.now(UTC), a_spec("example-1")
    return Attempt(
        Claim(new_id(), 1, new_id(), new_id(), instance.id, Mode.PERSISTENT, deadline_at, spec), instance, []
    )


def _finished(clock: Hand, starts: list[tuple[float, Instance]], **told: Any) -> list[float]:
    """When each of the downloads, of 10 seconds alone, is done."""
    shared: Any = clock
    ours, found = Links(shared), dict[Attempt, float]()
    ours.follow(Simulation.of(**told))
    attempts = []
    for at, instance in starts:
        clock.turn_until(at)
        attempts.append(_attempt(instance))
        ours.download(attempts[-1], 10.0, found.__setitem__)
    clock.turn_until(1000.0)
    return [found[attempt] for attempt in attempts]


def test_downloads_of_one_instance_share_its_link_and_those_of_another_do_not(clock: Hand) -> None:
    one, other = _instance(), _instance()
    assert _finished(clock, [(0, one), (0, one), (0, other)]) == pytest.approx([20, 20, 10])


def test_a_registry_that_serves_two_links_makes_four_instances_wait(clock: Hand) -> None:
    assert _finished(clock, [(0, _instance()) for _ in range(4)], registry_links=2) == pytest.approx([20] * 4)


def test_a_download_of_an_attempt_that_is_over_takes_nothing_and_is_not_reported(clock: Hand) -> None:
    shared: Any = clock
    ours, found = Links(shared), dict[Attempt, float]()
    instance = _instance()
    stopped, goes_on = _attempt(instance), _attempt(instance)
    for attempt in (stopped, goes_on):
        ours.download(attempt, 10.0, found.__setitem__)
    clock.turn_until(4.0)
    stopped.over = True
    clock.turn_until(100.0)
    assert list(found) == [goes_on]
    assert found[goes_on] == pytest.approx(12.0, abs=0.05)  # two of its seconds by then, eight alone


def test_stages_of_their_own_stand_before_the_agents_time_and_an_image_that_is_there_is_not_unpacked() -> None:
    told = Simulation.of(pull_s="constant:5", unpack_s="constant:2", start_s="constant:1", run_s="constant:10")
    model, claim = RandomModel(told), _attempt(_instance()).claimed
    found = [
        {step.phase: step.at for step in model.course(claim, 100.0, pulled=pulled) if step.phase}
        for pulled in (True, False)
    ]
    phases = (Phase.IMAGE_READY, Phase.ENVIRONMENT_READY, Phase.AGENT_ENDED, Phase.STORED)
    assert [[times[phase] for phase in phases] for times in found] == [[102, 103, 113, 113], [100, 101, 111, 111]]
    assert RandomModel(Simulation.of(pull_s="constant:5", cached=1.0)).pull_s() == 0.0
