"""Where tasks run when several hosts could have them: their images decide, within bounds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.models.spec import SEVERAL
from app.scheduling import placement
from app.scheduling.placement import Contender, PlacementChoice, home_of, place

HOSTS = ("alpha", "beta", "gamma")
images = st.sampled_from(["", "i", "j", "k", "l"])
tasks = st.lists(st.tuples(st.sampled_from("ab"), images), max_size=30).map(
    lambda found: [Contender(number, turn, image) for number, (turn, image) in enumerate(found)]
)
slots = st.dictionaries(st.sampled_from(HOSTS), st.integers(0, 5))
presence = st.dictionaries(images, st.sets(st.sampled_from(HOSTS)))


def line(*wanted: str, turn: Any = "a") -> list[Contender]:
    """Tasks of one turn, numbered, by their images."""
    return [Contender(number, turn, image) for number, image in enumerate(wanted)]


def put(
    going: list[Contender], behind: list[Contender], free: dict[str, int], where: dict[str, set[str]]
) -> PlacementChoice:
    return place(going, behind, free, where, {})


def test_a_task_goes_where_its_image_is() -> None:
    made = put(line("i", "j"), [], {"alpha": 5, "beta": 1}, {"i": {"beta"}, "j": {"alpha"}})
    assert dict(made.chosen) == {0: "beta", 1: "alpha"}


def test_a_host_without_a_free_slot_is_not_waited_for() -> None:
    assert put(line("i"), [], {"alpha": 0, "beta": 1}, {"i": {"alpha"}}).chosen == [(0, "beta")]
    assert put(line("i"), [], {"alpha": 0}, {"i": {"alpha"}}).chosen == [(0, None)]


def test_of_equal_tasks_one_whose_image_is_where_the_slot_is_goes_first() -> None:
    queue = line("i", "j", "k")
    made = put(queue[:1], queue[1:], {"alpha": 1, "beta": 0}, {"i": {"beta"}, "j": {"beta"}, "k": {"alpha"}})
    assert made.chosen == [(2, "alpha")]
    assert made.overtaken == {0: 1, 1: 1}


def test_tasks_of_another_turn_do_not_change_places() -> None:
    behind = [Contender(1, "b", "j")]
    assert put(line("i"), behind, {"alpha": 1}, {"i": {"beta"}, "j": {"alpha"}}).chosen == [(0, "alpha")]


def test_replicas_of_an_image_that_nobody_has_go_to_one_host_while_it_has_room() -> None:
    made = put(line("i", "j", "i", "i"), [], {"alpha": 9, "beta": 9}, {})
    hosts = dict(made.chosen)
    assert hosts[0] == hosts[2] == hosts[3] == home_of("i", ["alpha", "beta"])
    assert hosts[1] == home_of("j", ["alpha", "beta"])


def test_images_that_nobody_has_are_spread_over_the_hosts_and_stay_when_another_host_comes() -> None:
    names = [f"image-{n}" for n in range(3000)]
    two = {name: home_of(name, ["alpha", "beta"]) for name in names}
    three = {name: home_of(name, HOSTS) for name in names}
    assert min(Counter(three.values()).values()) > 900
    assert all(three[name] in (two[name], "gamma") for name in names)
    assert home_of("i", []) is None


@given(tasks, st.integers(0, 30), slots, presence)
def test_as_many_of_each_turn_go_as_were_chosen_in_their_order_and_no_slot_is_left_or_taken_twice(
    found: list[Contender], going: int, free: dict[str, int], where: dict[str, set[str]]
) -> None:
    chosen, behind = found[:going], found[going:]
    made = place(chosen, behind, free, where, {})
    by_identity = {task.identity: task for task in found}
    assert [by_identity[identity].turn for identity, _ in made.chosen] == [task.turn for task in chosen]
    assert len({identity for identity, _ in made.chosen}) == len(chosen)
    used = Counter(host for _, host in made.chosen if host is not None)
    assert all(count <= free[host] for host, count in used.items())
    assert used.total() == min(len(chosen), sum(free.values()))


@given(
    st.lists(images, min_size=1, max_size=40),
    st.lists(st.tuples(st.integers(1, 4), slots), min_size=1, max_size=60),
    presence,
    st.integers(0, 5),
    st.integers(1, 8),
)
def test_nobody_is_overtaken_by_more_than_the_bound_however_the_slots_come(
    wanted: list[str], rounds: list[tuple[int, dict[str, int]]], where: dict[str, set[str]], most: int, reach: int
) -> None:
    waiting, went = line(*wanted), []
    overtaken: dict[Any, int] = {}
    for count, free in rounds:
        made = place(waiting[:count], waiting[count:], free, where, overtaken, look_ahead=reach, most_overtaken=most)
        went += [identity for identity, _ in made.chosen]
        overtaken.update(made.overtaken)
        waiting = [task for task in waiting if task.identity not in went]
    order = went + [task.identity for task in waiting]
    for place_in_order, identity in enumerate(order):
        before = [other for other in order[:place_in_order] if other > identity]
        assert len(before) <= most
        assert all(other - identity < reach + most for other in before)


def test_the_work_of_a_long_choice_grows_with_what_goes_and_not_with_its_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[str] = []
    real = placement._Hosts.with_image
    monkeypatch.setattr(placement._Hosts, "with_image", lambda hosts, image: looked.append(image) or real(hosts, image))
    queue = line(*(f"image-{n}" for n in range(600)))
    place(queue[:500], queue[500:], {"alpha": 500}, {}, {})
    assert 500 <= len(looked) <= 500 * placement.LOOK_AHEAD


def test_images_of_several_containers_have_no_home_and_go_where_they_are() -> None:
    several = f"{SEVERAL}x"
    assert home_of(several, HOSTS) is None
    made = put(line(several, "i"), [], {"alpha": 1, "beta": 9}, {several: {"alpha"}, "i": {"beta"}})
    assert dict(made.chosen) == {0: "alpha", 1: "beta"}
