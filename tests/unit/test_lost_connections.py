"""A standing instance is lost when it was connected and is missing at two looks in a row, and not otherwise."""

from __future__ import annotations

from uuid import UUID, uuid4

from app.ledger.connections import LostConnections, key_of

A, B = UUID(int=1 << 100 | 1), UUID(int=1 << 100 | 2)


def _keys(*ids: UUID) -> set[int]:
    return {key_of(one) for one in ids}


def test_one_that_goes_is_lost_at_the_second_look() -> None:
    looks = LostConnections()
    assert looks.look([A, B], _keys(A, B)) == []
    assert looks.look([A, B], _keys(B)) == []
    assert looks.look([A, B], _keys(B)) == [A]


def test_one_that_comes_back_between_is_not() -> None:
    looks = LostConnections()
    for held in (_keys(A), set(), _keys(A), set()):
        assert looks.look([A], held) == []
    assert looks.look([A], set()) == [A]


def test_one_that_was_never_connected_is_left_to_its_lease() -> None:
    looks = LostConnections()
    assert [looks.look([A], set()) for _ in range(5)] == [[]] * 5


def test_after_a_start_of_the_server_counting_begins_anew() -> None:
    looks = LostConnections()
    looks.look([A], _keys(A))
    looks.look([A], set())
    assert looks.look([A], set(), settled=False) == []
    assert looks.look([A], set()) == []
    assert looks.look([A], set()) == [A]


def test_one_that_was_seen_while_the_server_was_young_is_known() -> None:
    looks = LostConnections()
    looks.look([A], _keys(A), settled=False)
    assert looks.look([A], set()) == []
    assert looks.look([A], set()) == [A]


def test_one_that_has_ended_is_forgotten() -> None:
    looks = LostConnections()
    looks.look([A], _keys(A))
    assert [looks.look([], set()) for _ in range(3)] == [[]] * 3
    assert [looks.look([A], set()) for _ in range(3)] == [[]] * 3


def test_keys_are_above_the_named_locks_and_fit_into_an_oid() -> None:
    assert all(1 << 30 <= key_of(uuid4()) < 1 << 31 for _ in range(100))
