"""What every provider of instances does, held against each of them on its engine; ground.py says how to add one."""

from __future__ import annotations

from contextlib import suppress
from uuid import uuid4

import pytest

from app.errors import InstanceFailed, LaunchUnclear, NoCapacity
from app.ledger import instances
from app.models.instance import InstanceRequest
from tests.contract.instances.conftest import ControlPlane
from tests.contract.instances.ground import SECRET, ProviderGround
from tests.waiting import eventually, in_background


def _made(ground: ProviderGround, requests: list[InstanceRequest]) -> list[int]:
    return [ground.made(request.instance_id) for request in requests]


def test_many_are_launched_at_once_each_with_a_handle(ground: ProviderGround) -> None:
    requests = ground.requested(5)
    handles = ground.provider.launch(requests)
    assert set(handles) == {request.instance_id for request in requests}
    assert len(set(handles.values())) == 5
    assert ground.provider.alive() == handles
    eventually(lambda: _made(ground, requests) == [1] * 5, within_s=ground.slow_s)


def test_the_same_ids_asked_for_again_make_none_twice(ground: ProviderGround) -> None:
    old, new = ground.requested(2), ground.requested(1)
    before = ground.provider.launch(old)
    after = ground.provider.launch(old + new)
    assert before.items() <= after.items()
    assert ground.provider.alive() == after
    eventually(lambda: _made(ground, old + new) == [1] * 3, within_s=ground.slow_s)


@pytest.mark.needs("lost_reply")
def test_a_launch_whose_reply_is_lost_is_found_when_asked_for_again(
    ground: ProviderGround, watched: ControlPlane
) -> None:
    requests = ground.requested(2)
    handles = {}
    with ground.losing_replies(), suppress(LaunchUnclear):
        handles = ground.provider.launch(requests)
    assert handles == {}
    handles = ground.provider.launch(requests)
    assert ground.provider.alive() == handles
    eventually(lambda: _made(ground, requests) == [1, 1], within_s=ground.slow_s)
    for request in requests:  # they work, too
        ground.end(request.instance_id, handles[request.instance_id], 0)
    assert {watched.ended(request)[1] for request in requests} <= {0, None}


@pytest.mark.needs("capacity")
def test_a_full_engine_says_so_or_starts_fewer_and_nothing_else_is_made(ground: ProviderGround) -> None:
    requests = ground.requested(3)
    handles = {}
    with ground.full(), suppress(NoCapacity):
        handles = ground.provider.launch(requests)
    assert len(handles) < 3
    assert ground.provider.alive() == handles
    assert sum(_made(ground, requests)) == len(handles)


def test_an_engine_that_does_not_answer_is_an_error(ground: ProviderGround) -> None:
    away = ground.unreachable()
    (request,) = ground.requested()
    with pytest.raises(InstanceFailed):
        away.launch([request])
    with pytest.raises(InstanceFailed):
        away.alive()
    with pytest.raises(InstanceFailed):
        away.terminate(request.instance_id, "1", grace_s=0)


def test_other_users_see_no_secret_of_an_instance(ground: ProviderGround) -> None:
    requests = ground.requested()
    (handle,) = ground.provider.launch(requests).values()
    shown = ground.shown(handle)
    assert shown
    assert SECRET not in shown


def test_terminate_ends_it_and_again_is_no_error(ground: ProviderGround) -> None:
    first, second = ground.requested(2)
    handles = ground.provider.launch([first, second])
    eventually(lambda: _made(ground, [first, second]) == [1, 1], within_s=ground.slow_s)
    ground.provider.terminate(first.instance_id, handles[first.instance_id], grace_s=0)
    eventually(lambda: _made(ground, [first, second]) == [0, 1], within_s=ground.slow_s)
    ground.provider.terminate(first.instance_id, handles[first.instance_id], grace_s=0)
    assert ground.provider.alive() == {second.instance_id: handles[second.instance_id]}


@pytest.mark.needs("grace")
def test_with_a_grace_its_worker_is_told_and_leaves_by_itself(ground: ProviderGround, watched: ControlPlane) -> None:
    (request,) = ground.requested()
    (handle,) = ground.provider.launch([request]).values()
    ground.await_worker(request.instance_id)
    ground.provider.terminate(request.instance_id, handle, grace_s=10)
    state, code = watched.ended(request)
    assert (state, code) == (("terminated", 75) if "codes" in ground.abilities else (state, None))


@pytest.mark.parametrize(("code", "state"), [(0, "terminated"), (75, "terminated"), (7, "failed")])
def test_an_end_is_on_record_with_its_exit_code(
    ground: ProviderGround, watched: ControlPlane, code: int, state: str
) -> None:
    (request,) = ground.requested()
    (handle,) = ground.provider.launch([request]).values()
    ground.end(request.instance_id, handle, code)
    if "codes" in ground.abilities:
        assert watched.ended(request) == (state, code)
    else:
        assert watched.ended(request)[1] is None
    eventually(lambda: ground.provider.alive() == {}, within_s=ground.slow_s)


def test_one_that_is_taken_away_is_on_record(ground: ProviderGround, watched: ControlPlane) -> None:
    (request,) = ground.requested()
    (handle,) = ground.provider.launch([request]).values()
    eventually(lambda: ground.made(request.instance_id), within_s=ground.slow_s)
    ground.take_away(handle)
    assert watched.ended(request)[0] == "failed"
    eventually(lambda: ground.provider.alive() == {}, within_s=ground.slow_s)


def test_an_end_that_nobody_heard_is_on_record_in_the_end(ground: ProviderGround, control: ControlPlane) -> None:
    """By the watch, which begins with what was missed, or by the reconciler, which compares lists."""
    (request,) = ground.requested()
    handles = ground.provider.launch([request])
    instances.launched(ground.database, handles)
    ground.end(request.instance_id, handles[request.instance_id], 0)
    eventually(lambda: not ground.provider.alive(), within_s=ground.slow_s)
    with in_background(control.watch):
        eventually(lambda: control.sweep() or control.row(request)[0] in ("terminated", "failed"))


def test_the_engine_ends_one_whose_lifetime_is_over(ground: ProviderGround) -> None:
    (request,) = ground.requested(lifetime_s=1.0)
    ground.provider.launch([request])
    ground.await_lifetime(request)


def test_one_that_never_registers_is_ended(ground: ProviderGround, control: ControlPlane) -> None:
    (request,) = ground.requested()
    instances.launched(ground.database, ground.provider.launch([request]))
    eventually(lambda: control.sweep() or control.row(request)[0] == "failed")
    eventually(lambda: not ground.made(request.instance_id), within_s=ground.slow_s)
    assert not instances.ready(ground.database, request.instance_id)  # should it come all the same, it must leave


def test_one_that_the_ledger_does_not_know_is_ended(ground: ProviderGround, control: ControlPlane) -> None:
    (request,) = ground.requested()
    stranger = request.model_copy(update={"instance_id": uuid4()})
    ground.provider.launch([stranger])
    eventually(lambda: ground.made(stranger.instance_id), within_s=ground.slow_s)
    control.sweep()
    eventually(lambda: not ground.made(stranger.instance_id), within_s=ground.slow_s)
