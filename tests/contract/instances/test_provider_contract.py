"""What every provider of instances does, held against each of them on its engine; fixture.py says how to add one."""

from __future__ import annotations

from contextlib import suppress
from uuid import uuid4

import pytest

from app.errors import InstanceFailed, LaunchUnclear, NoCapacity
from app.ledger import instances
from app.models.instance import InstanceRequest
from tests.contract.instances.conftest import ControlPlane
from tests.contract.instances.fixture import SECRET, ProviderFixture
from tests.waiting import eventually, in_background


def _made(fixture: ProviderFixture, requests: list[InstanceRequest]) -> list[int]:
    return [fixture.made(request.instance_id) for request in requests]


def test_many_are_launched_at_once_each_with_a_handle(fixture: ProviderFixture) -> None:
    requests = fixture.requested(5)
    handles = fixture.provider.launch(requests)
    assert set(handles) == {request.instance_id for request in requests}
    assert len(set(handles.values())) == 5
    assert fixture.provider.alive() == handles
    eventually(lambda: _made(fixture, requests) == [1] * 5, within_s=fixture.slow_s)


def test_the_same_ids_asked_for_again_make_none_twice(fixture: ProviderFixture) -> None:
    old, new = fixture.requested(2), fixture.requested(1)
    before = fixture.provider.launch(old)
    after = fixture.provider.launch(old + new)
    assert before.items() <= after.items()
    assert fixture.provider.alive() == after
    eventually(lambda: _made(fixture, old + new) == [1] * 3, within_s=fixture.slow_s)


@pytest.mark.needs("lost_reply")
def test_a_launch_whose_reply_is_lost_is_found_when_asked_for_again(
    fixture: ProviderFixture, watched: ControlPlane
) -> None:
    requests = fixture.requested(2)
    handles = {}
    with fixture.losing_replies(), suppress(LaunchUnclear):
        handles = fixture.provider.launch(requests)
    assert handles == {}
    handles = fixture.provider.launch(requests)
    assert fixture.provider.alive() == handles
    eventually(lambda: _made(fixture, requests) == [1, 1], within_s=fixture.slow_s)
    for request in requests:  # they work, too
        fixture.end(request.instance_id, handles[request.instance_id], 0)
    assert {watched.ended(request)[1] for request in requests} <= {0, None}


@pytest.mark.needs("capacity")
def test_a_full_engine_says_so_or_starts_fewer_and_nothing_else_is_made(fixture: ProviderFixture) -> None:
    requests = fixture.requested(3)
    handles = {}
    with fixture.full(), suppress(NoCapacity):
        handles = fixture.provider.launch(requests)
    assert len(handles) < 3
    assert fixture.provider.alive() == handles
    assert sum(_made(fixture, requests)) == len(handles)


def test_an_engine_that_does_not_answer_is_an_error(fixture: ProviderFixture) -> None:
    away = fixture.unreachable()
    (request,) = fixture.requested()
    with pytest.raises(InstanceFailed):
        away.launch([request])
    with pytest.raises(InstanceFailed):
        away.alive()
    with pytest.raises(InstanceFailed):
        away.terminate(request.instance_id, "1", grace_s=0)


def test_other_users_see_no_secret_of_an_instance(fixture: ProviderFixture) -> None:
    requests = fixture.requested()
    (handle,) = fixture.provider.launch(requests).values()
    shown = fixture.shown(handle)
    assert shown
    assert SECRET not in shown


def test_terminate_ends_it_and_again_is_no_error(fixture: ProviderFixture) -> None:
    first, second = fixture.requested(2)
    handles = fixture.provider.launch([first, second])
    eventually(lambda: _made(fixture, [first, second]) == [1, 1], within_s=fixture.slow_s)
    fixture.provider.terminate(first.instance_id, handles[first.instance_id], grace_s=0)
    eventually(lambda: _made(fixture, [first, second]) == [0, 1], within_s=fixture.slow_s)
    fixture.provider.terminate(first.instance_id, handles[first.instance_id], grace_s=0)
    assert fixture.provider.alive() == {second.instance_id: handles[second.instance_id]}


@pytest.mark.needs("grace")
def test_with_a_grace_its_worker_is_told_and_leaves_by_itself(fixture: ProviderFixture, watched: ControlPlane) -> None:
    (request,) = fixture.requested()
    (handle,) = fixture.provider.launch([request]).values()
    fixture.await_worker(request.instance_id)
    fixture.provider.terminate(request.instance_id, handle, grace_s=10)
    state, code = watched.ended(request)
    assert (state, code) == (("terminated", 75) if "codes" in fixture.abilities else (state, None))


@pytest.mark.parametrize(("code", "state"), [(0, "terminated"), (75, "terminated"), (7, "failed")])
def test_an_end_is_on_record_with_its_exit_code(
    fixture: ProviderFixture, watched: ControlPlane, code: int, state: str
) -> None:
    (request,) = fixture.requested()
    (handle,) = fixture.provider.launch([request]).values()
    fixture.end(request.instance_id, handle, code)
    if "codes" in fixture.abilities:
        assert watched.ended(request) == (state, code)
    else:
        assert watched.ended(request)[1] is None
    eventually(lambda: fixture.provider.alive() == {}, within_s=fixture.slow_s)


def test_one_that_is_taken_away_is_on_record(fixture: ProviderFixture, watched: ControlPlane) -> None:
    (request,) = fixture.requested()
    (handle,) = fixture.provider.launch([request]).values()
    eventually(lambda: fixture.made(request.instance_id), within_s=fixture.slow_s)
    fixture.take_away(handle)
    assert watched.ended(request)[0] == "failed"
    eventually(lambda: fixture.provider.alive() == {}, within_s=fixture.slow_s)


def test_an_end_that_nobody_heard_is_on_record_in_the_end(fixture: ProviderFixture, control: ControlPlane) -> None:
    """By the watch, which begins with what was missed, or by the reconciler, which compares lists."""
    (request,) = fixture.requested()
    handles = fixture.provider.launch([request])
    instances.launched(fixture.database, handles)
    fixture.end(request.instance_id, handles[request.instance_id], 0)
    eventually(lambda: not fixture.provider.alive(), within_s=fixture.slow_s)
    with in_background(control.watch):
        eventually(lambda: control.sweep() or control.row(request)[0] in ("terminated", "failed"))


def test_the_engine_ends_one_whose_lifetime_is_over(fixture: ProviderFixture) -> None:
    (request,) = fixture.requested(lifetime_s=1.0)
    fixture.provider.launch([request])
    fixture.await_lifetime(request)


def test_one_that_never_registers_is_ended(fixture: ProviderFixture, control: ControlPlane) -> None:
    (request,) = fixture.requested()
    instances.launched(fixture.database, fixture.provider.launch([request]))
    eventually(lambda: control.sweep() or control.row(request)[0] == "failed")
    eventually(lambda: not fixture.made(request.instance_id), within_s=fixture.slow_s)
    assert not instances.ready(fixture.database, request.instance_id)  # should it come all the same, it must leave


def test_one_that_the_ledger_does_not_know_is_ended(fixture: ProviderFixture, control: ControlPlane) -> None:
    (request,) = fixture.requested()
    stranger = request.model_copy(update={"instance_id": uuid4()})
    fixture.provider.launch([stranger])
    eventually(lambda: fixture.made(stranger.instance_id), within_s=fixture.slow_s)
    control.sweep()
    eventually(lambda: not fixture.made(stranger.instance_id), within_s=fixture.slow_s)
