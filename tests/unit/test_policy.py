"""The scheduler's decisions."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from app.models.spec import Mode
from app.scheduling import policy
from app.scheduling.policy import Key, Line

E_STD: Key = (Mode.EPHEMERAL, "standard")
P_STD: Key = (Mode.PERSISTENT, "standard")

lines = st.lists(
    st.builds(Line, st.uuids(), st.sampled_from(list(Mode)), st.sampled_from(["standard", "gpu"])), max_size=40
)
slots = st.dictionaries(
    st.tuples(st.sampled_from([Mode.EPHEMERAL, Mode.PERSISTENT]), st.sampled_from(["standard", "gpu"])),
    st.integers(0, 10),
).map(Counter)


def test_auto_prefers_a_free_slot_of_the_standing_pool() -> None:
    assert policy.choose_mode(Mode.AUTO, "standard", Counter({E_STD: 1, P_STD: 1})) is Mode.PERSISTENT
    assert policy.choose_mode(Mode.AUTO, "standard", Counter({E_STD: 1})) is Mode.EPHEMERAL
    assert policy.choose_mode(Mode.AUTO, "standard", Counter()) is None


def test_a_task_that_must_wait_does_not_hold_up_one_that_need_not() -> None:
    waiting = [Line("a", Mode.EPHEMERAL, "standard"), Line("b", Mode.PERSISTENT, "standard")]
    assert policy.admit(waiting, Counter({P_STD: 1})) == [("b", Mode.PERSISTENT)]


def test_first_come_first_served() -> None:
    waiting = [Line(n, Mode.EPHEMERAL, "standard") for n in range(5)]
    assert [identity for identity, _ in policy.admit(waiting, Counter({E_STD: 3}))] == [0, 1, 2]


@given(lines, slots)
def test_never_more_is_admitted_than_is_free(waiting: list[Line], free: Counter[Key]) -> None:
    by_identity = {line.identity: line for line in waiting}
    used = Counter(
        (mode, by_identity[identity].resource_class) for identity, mode in policy.admit(waiting, Counter(free))
    )
    assert all(used[key] <= free[key] for key in used)


@given(lines, slots)
def test_nobody_waits_beside_a_slot_that_fits(waiting: list[Line], free: Counter[Key]) -> None:
    admitted = dict(policy.admit(waiting, Counter(free)))
    left = Counter(free)
    by_identity = {line.identity: line for line in waiting}
    left.subtract(Counter((mode, by_identity[i].resource_class) for i, mode in admitted.items()))
    for line in waiting:
        if line.identity not in admitted:
            assert policy.choose_mode(line.mode, line.resource_class, left) is None


@given(slots, slots)
def test_free_slots_are_never_negative(capacity: Counter[Key], live: Counter[Key]) -> None:
    assert all(count >= 0 for count in policy.free_slots(capacity, live).values())


def test_instances_are_requested_only_for_what_no_coming_one_will_take() -> None:
    assert policy.missing_ephemeral({E_STD: 5, P_STD: 7}, {E_STD: 3}) == Counter({E_STD: 2})
    assert policy.missing_ephemeral({E_STD: 2}, {E_STD: 3}) == Counter()
