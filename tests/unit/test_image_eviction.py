"""Which images go: never what is in use, never more than needed, and no other choice would pull less."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from app.images.eviction import HeldImage, ImageLayer, choose_victims, total_bytes

KEYS = "abcdefg"


def freed_bytes(images: Sequence[HeldImage], gone: Collection[str]) -> int:
    """What the disk has less without these images."""
    return total_bytes(images) - total_bytes(image for image in images if image.id not in gone)


@st.composite
def hosts(draw: st.DrawFn) -> list[HeldImage]:
    """Images that share layers: each is a path in a tree, as on an engine."""
    parents = draw(st.lists(st.integers(-1, 20), min_size=1, max_size=12))
    sizes = draw(st.lists(st.integers(0, 100), min_size=len(parents), max_size=len(parents)))

    def chain(number: int) -> tuple[ImageLayer, ...]:
        parent = min(parents[number], number - 1)
        below = chain(parent) if parent >= 0 else ()
        return (*below, ImageLayer(str(number), sizes[number]))

    tops = draw(st.lists(st.integers(0, len(parents) - 1), max_size=7, unique=True))
    used = draw(st.lists(st.integers(0, 5), min_size=len(tops), max_size=len(tops)))
    return [HeldImage(f"id-{KEYS[n]}", frozenset(KEYS[n]), chain(top), float(used[n])) for n, top in enumerate(tops)]


QUEUES = st.lists(st.sampled_from(KEYS), max_size=12)
NEEDS = st.integers(-10, 600)


@given(hosts(), QUEUES, st.sets(st.sampled_from([f"id-{key}" for key in KEYS])), NEEDS)
def test_what_is_in_use_stays_and_enough_goes_when_enough_may(
    images: list[HeldImage], queue: list[str], in_use: set[str], need: int
) -> None:
    victims = choose_victims(images, queue, in_use, need)
    assert len(victims) == len(set(victims))
    assert not in_use.intersection(victims)
    may_go = {image.id for image in images} - in_use
    assert freed_bytes(images, victims) >= min(need, freed_bytes(images, may_go))


@given(hosts(), QUEUES, NEEDS)
def test_no_victim_is_needless(images: list[HeldImage], queue: list[str], need: int) -> None:
    victims = choose_victims(images, queue, (), need)
    if freed_bytes(images, victims) >= need:
        assert all(freed_bytes(images, set(victims) - {one}) < need for one in victims)


@given(hosts())
@settings(max_examples=40)
def test_what_is_freed_is_what_the_rest_does_not_hold(images: list[HeldImage]) -> None:
    for count in range(len(images) + 1):
        for gone in combinations([image.id for image in images], count):
            rest = [image for image in images if image.id not in gone]
            assert freed_bytes(images, gone) == total_bytes(images) - total_bytes(rest)


def test_the_furthest_in_the_future_goes_first_and_of_those_nobody_needs_the_longest_unused() -> None:
    last_used = {"a": 9.0, "b": 9.0, "c": 2.0, "d": 1.0}
    images = [HeldImage(f"id-{key}", frozenset(key), (ImageLayer(key, 10),), used) for key, used in last_used.items()]
    assert choose_victims(images, ["a", "b", "a"], (), 35) == ["id-d", "id-c", "id-b", "id-a"]
    assert choose_victims(images, ["a", "b", "a"], (), 21) == ["id-d", "id-c", "id-b"]


def test_a_layer_stays_for_as_long_as_one_image_has_it() -> None:
    base = ImageLayer("base", 400)
    images = [HeldImage(f"id-{key}", frozenset(key), (base, ImageLayer(key, 20)), 0.0) for key in "abc"]
    assert choose_victims(images, "abc", (), 30) == ["id-c", "id-b"]
    assert freed_bytes(images, {"id-c", "id-b"}) == 40
    assert choose_victims(images, "abc", {"id-a"}, 1000) == ["id-c", "id-b"]


def pulls_of_ours(requests: Sequence[str], room: int) -> int:
    """Images of one size on a disk for `room` of them; what is asked for now may not go."""
    here: dict[str, HeldImage] = {}
    pulls = 0
    for place, key in enumerate(requests):
        if key not in here:
            pulls += 1
            need = len(here) + 1 - room
            for victim in choose_victims(list(here.values()), requests[place:], (), need):
                del here[victim]
            here[key] = HeldImage(key, frozenset(key), (ImageLayer(key, 1),), float(place))
    return pulls


def fewest_pulls(requests: tuple[str, ...], room: int) -> int:
    """By trying every choice."""

    @cache
    def fewest(place: int, here: frozenset[str]) -> int:
        if place == len(requests):
            return 0
        key = requests[place]
        if key in here:
            return fewest(place + 1, here)
        if len(here) < room:
            return 1 + fewest(place + 1, here | {key})
        return 1 + min(fewest(place + 1, (here - {victim}) | {key}) for victim in here)

    return fewest(0, frozenset())


@settings(max_examples=100)
@given(st.lists(st.sampled_from(KEYS[:5]), max_size=14), st.integers(1, 4))
def test_no_other_choice_pulls_less_when_images_are_of_one_size(requests: list[str], room: int) -> None:
    assert pulls_of_ours(requests, room) == fewest_pulls(tuple(requests), room)


def test_what_a_set_up_made_goes_before_the_image_and_before_others_that_nobody_needs() -> None:
    base, top = ImageLayer("base", 100), ImageLayer("top", 10)
    made = HeldImage("made", frozenset("a"), (base, top), used_at=9.0, derived=True)
    image = HeldImage("image", frozenset("a"), (base,), used_at=5.0)
    other = HeldImage("other", frozenset("b"), (ImageLayer("other", 50),), used_at=1.0)
    needed = HeldImage("needed", frozenset("c"), (ImageLayer("needed", 50),), used_at=0.0)
    held = [needed, other, image, made]
    assert choose_victims(held, ["c"], (), 5) == ["made"]
    assert choose_victims(held, ["c"], (), 60) == ["made", "other"]
    assert choose_victims(held, ["c"], (), 1000) == ["made", "other", "image", "needed"]
    assert choose_victims(held, ["a", "c"], (), 5) == ["other"], "a set-up that the queue needs again stays"
    assert choose_victims(held, ["c", "a"], (), 160) == ["other", "made", "image"]
