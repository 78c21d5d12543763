"""Who makes what ahead: held against its promises, whatever is needed and whoever serves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from app.scheduling.division import Needed, divide

LINES, KINS, IMAGES, HOSTS = "xy", "abcd", "ij", ("alpha", "beta", "gamma")
needed = st.builds(
    lambda line, kin: Needed(line, kin, IMAGES[KINS.index(kin) % 2]), st.sampled_from(LINES), st.sampled_from(KINS)
)
queues = st.lists(needed, max_size=40)
slots = st.dictionaries(st.sampled_from(HOSTS), st.integers(0, 9))
servings = st.dictionaries(st.sampled_from(LINES), slots)
havings = st.dictionaries(st.sampled_from(IMAGES), st.sets(st.sampled_from(HOSTS)))


@given(queues, servings, havings)
def test_each_has_one_maker_that_serves_its_line_and_has_its_image_if_any_has(
    queue: list[Needed], serving: Mapping[str, Mapping[str, int]], where: Mapping[str, set[str]]
) -> None:
    for need, maker in zip(queue, divide(queue, serving, where), strict=True):
        able = {host for host, number in serving.get(need.line, {}).items() if number}
        if not able:
            assert maker is None
        else:
            assert maker in (able & where.get(need.image, set()) or able)


@given(queues, st.sampled_from(HOSTS), st.integers(1, 9))
def test_a_host_alone_makes_all(queue: list[Needed], host: str, number: int) -> None:
    assert divide(queue, {line: {host: number} for line in LINES}, {}) == [host] * len(queue)


@given(st.integers(0, 60), st.integers(1, 9), st.sampled_from(KINS))
def test_of_one_kin_hosts_of_one_size_make_the_same_number(replicas: int, number: int, kin: str) -> None:
    made = Counter(divide([Needed("x", kin, "i")] * replicas, {"x": dict.fromkeys(HOSTS, number)}, {}))
    counts = [made[host] for host in HOSTS]
    assert max(counts) - min(counts) <= 1


@given(st.dictionaries(st.sampled_from(HOSTS), st.integers(1, 9), min_size=2), st.sampled_from(KINS))
def test_of_one_kin_each_host_makes_what_goes_with_its_slots(sizes: dict[str, int], kin: str) -> None:
    made = Counter(divide([Needed("x", kin, "i")] * 10 * sum(sizes.values()), {"x": sizes}, {}))
    assert all(abs(made[host] - 10 * number) <= number for host, number in sizes.items())


@given(queues, servings, havings)
def test_when_the_first_has_gone_one_host_has_one_too_many_and_nobody_too_few(
    queue: list[Needed], serving: Mapping[str, Mapping[str, int]], where: Mapping[str, set[str]]
) -> None:
    def parts(needs: list[Needed]) -> Counter[tuple[str | None, Needed]]:
        return Counter(zip(divide(needs, serving, where), needs, strict=True))

    before, after = parts(queue), parts(queue[1:])
    assert (before - after).total() == min(1, len(queue))
    assert not after - before


def test_tasks_that_are_all_different_are_spread_and_stay_where_they_are() -> None:
    queue = [Needed("x", f"kin-{number}", "i") for number in range(300)]
    found = divide(queue, {"x": dict.fromkeys(HOSTS, 4)}, {})
    assert all(70 < count < 130 for count in Counter(found).values())
    assert divide(queue[1:], {"x": dict.fromkeys(HOSTS, 4)}, {}) == found[1:]


def test_where_a_task_is_or_goes_its_environment_is_made() -> None:
    queue = [Needed("x", "a", "i", host) for host in ("beta", "elsewhere", None)]
    assert divide(queue, {"x": {"alpha": 1}}, {"i": {"alpha"}}) == ["beta", "elsewhere", "alpha"]
