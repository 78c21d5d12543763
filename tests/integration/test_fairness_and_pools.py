"""The dispatcher with users, quotas, classes, pauses, elastic pools, drains and quarantine, on a real ledger."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from uuid import UUID

import pytest
from sqlalchemy import text

from app.errors import SpecInvalid
from app.ledger import accept, admission, attempts, classes, ends, instances, pauses, quotas, results
from app.ledger.accept import Accepted, NewRun
from app.ledger.database import Database
from app.models.endings import EndReason
from app.models.outcome import Failure
from app.models.spec import Mode
from app.models.states import InstanceState, TaskState
from app.scheduling.dispatcher import Dispatcher
from app.settings import Settings
from tests.building import RETRY, a_spec, accepted, claimed, dispatched, failed, ready_instance
from tests.integration.rows import every, one, write
from tests.integration.test_scheduling import World, dispatcher, world
from tests.services import MakeSettings

__all__ = ["dispatcher", "world"]


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings(ephemeral_capacity=6, persistent_instances=0, retry_base_s=0.0)


def submit(database: Database, user: str, count: int, *, replicas: int = 1, **options: object) -> Accepted:
    specs = [a_spec(f"example-{n}", mode=Mode.EPHEMERAL) for n in range(count)]
    return accept.accept(database, NewRun(specs=specs, replicas=replicas, user_name=user, **options))  # type: ignore[arg-type]


def live_by_user(database: Database) -> Counter[str]:
    rows = every(database, "SELECT user_name FROM attempts WHERE state IN ('dispatched', 'running')")
    return Counter(row.user_name for row in rows)


def bindings(database: Database) -> set[tuple[str, str]]:
    rows = every(database, "SELECT limit_name, user_name FROM bindings WHERE until IS NULL")
    return {(row.limit_name, row.user_name) for row in rows}


def test_a_crowd_of_one_user_does_not_hold_up_another(dispatcher: Dispatcher, database: Database) -> None:
    submit(database, "crowd", 1, replicas=500)
    submit(database, "small", 3)
    dispatcher.pass_once()
    assert live_by_user(database) == {"crowd": 3, "small": 3}
    assert bindings(database) == {("slots:ephemeral.standard", "crowd")}


def test_a_quota_binds_its_user_is_on_record_and_lets_go_when_it_is_raised(
    dispatcher: Dispatcher, database: Database
) -> None:
    quotas.set_quota(database, "alice", running=2)
    submit(database, "alice", 4)
    dispatcher.pass_once()
    assert live_by_user(database) == {"alice": 2}
    assert bindings(database) == {("quota:running:alice", "alice")}
    quotas.set_quota(database, "alice", running=9)
    dispatcher.pass_once()
    assert live_by_user(database) == {"alice": 4}
    assert bindings(database) == set()
    assert database.sql("SELECT until > since FROM bindings").scalars().all() == [True]
    kinds = database.sql("SELECT kind FROM events WHERE kind LIKE 'limit.%' ORDER BY id").scalars()
    assert list(kinds) == ["limit.bound", "limit.freed"]


def test_a_group_that_has_started_goes_before_one_that_has_not(dispatcher: Dispatcher, database: Database) -> None:
    run = submit(database, "a", 3, replicas=4)  # groups of 4; six slots: the second group is begun and not done
    # The first group is held back, so that the second is the one that has begun when it comes back.
    later = "UPDATE tasks SET in_line = false, available_at = now() + interval '1 h' WHERE id = ANY(:ids)"
    write(database, later, ids=list(run.task_ids[:4]))
    dispatcher.pass_once()
    states = [task.state for task in results.results(database, run.task_ids)]
    assert states == [TaskState.PENDING] * 4 + [TaskState.ADMITTED] * 6 + [TaskState.PENDING] * 2
    with database.begin() as connection:
        connection.execute(text("UPDATE tasks SET available_at = clock_timestamp() WHERE NOT in_line"))
        admission.promote(connection, 100)
        connection.execute(text("UPDATE attempts SET state = 'cancelled'"))
    dispatcher.pass_once()
    states = [task.state for task in results.results(database, run.task_ids)]
    assert states[10:] == [TaskState.ADMITTED] * 2  # the rest of the begun group, then the first one
    assert states[:4] == [TaskState.ADMITTED] * 4


def test_a_paused_run_waits_also_when_one_of_its_tasks_comes_back(dispatcher: Dispatcher, database: Database) -> None:
    run = submit(database, "a", 8)
    dispatcher.pass_once()
    instance = ready_instance(database, Mode.EPHEMERAL)
    claim = attempts.claim_any(database, instance, lease_s=30)
    assert claim is not None
    pauses.pause(database, str(run.run_id), "looking into it")
    failed(database, claim, EndReason.INFRASTRUCTURE)
    for _ in range(2):
        dispatcher.pass_once()
    assert results.run_status(database, run.run_id).states == {"admitted": 5, "pending": 3}
    pauses.resume(database, str(run.run_id))
    dispatcher.pass_once()
    assert results.run_status(database, run.run_id).states == {"admitted": 6, "pending": 2}


def test_a_class_has_lines_and_capacity_of_its_own(
    dispatcher: Dispatcher, database: Database, settings: Settings, world: World
) -> None:
    specs = [a_spec("example-1", mode=Mode.EPHEMERAL).model_copy(update={"resource_class": "gpu"})]
    with pytest.raises(SpecInvalid, match="gpu"):
        accept.accept(database, NewRun(specs=specs), settings)
    classes.set_class(database, "gpu", ephemeral_capacity=2)
    submit(database, "a", 9)
    accept.accept(database, NewRun(specs=specs, replicas=3), settings)
    dispatcher.pass_once()
    assert Counter(item.resource_class for item in world.sent) == {"standard": 6, "gpu": 2}
    assert Counter(request.resource_class for request in world.launched) == {"standard": 6, "gpu": 2}


def test_an_elastic_pool_grows_with_its_backlog_and_shrinks_when_it_has_been_idle(
    dispatcher: Dispatcher, database: Database, world: World
) -> None:
    classes.set_class(database, "standard", pool_min=0, pool_max=3, pool_slots=2, pool_cooldown_s=0.0)
    dispatcher.pass_once()
    assert world.launched == []
    accepted(database, 5)
    dispatcher.pass_once()
    assert len(world.launched) == 3  # five tasks, two at a time
    for request in world.launched:
        assert instances.ready(database, request.instance_id)
    dispatcher.pass_once()
    assert live_by_user(database) == {"default": 5}
    claims = [attempts.claim_any(database, r.instance_id, lease_s=30) for r in world.launched for _ in range(2)]
    gone, done = Failure(error="X", message="x"), [claim for claim in claims if claim is not None]
    assert len(done) == 5
    ends.fail_many(database, [ends.Failed(claim, EndReason.CANCELLED, gone, permanent=True) for claim in done], RETRY)
    dispatcher._kept_house_at = -10.0
    dispatcher.pass_once()
    states = {live.id: live.state for live in instances.live(database)}
    assert list(states.values()) == ["draining"] * 3


def test_a_draining_instance_takes_nothing_new_and_is_replaced(
    database: Database, make_settings: MakeSettings, world: World
) -> None:
    settings = make_settings(persistent_instances=1, persistent_slots=2)
    dispatcher = Dispatcher(database, settings, world.launch, world.publish)
    dispatcher.pass_once()
    (first,) = world.launched
    assert instances.ready(database, first.instance_id)
    accepted(database, 1)
    dispatcher.pass_once()
    assert instances.drain(database, [first.instance_id], "a deploy") == [first.instance_id]
    assert instances.drain(database, [first.instance_id], "again") == []
    assert instances.seen(database, first.instance_id) is InstanceState.DRAINING
    assert attempts.claim(database, world.sent[0].message, first.instance_id, lease_s=30) is None
    dispatcher.pass_once()
    assert len(world.launched) == 2
    admission.give_back(database, world.sent[0].message)
    dispatcher._kept_house_at = -10.0
    dispatcher.pass_once()
    assert [item.message for item in world.sent] == [world.sent[0].message] * 2


def test_an_instance_on_which_task_after_task_fails_is_found(database: Database) -> None:
    instance = ready_instance(database)
    dispatched(database, accepted(database, 7))
    of_tasks = [EndReason.SUBMITTED, *[EndReason.GRADING_ERROR] * 3]
    for number, reason in enumerate([*of_tasks, *[EndReason.ENVIRONMENT_ERROR] * 3]):
        with database.begin() as connection:
            assert instances.failing(connection, 3) == [], number
        claim = attempts.claim_any(database, instance, lease_s=30)
        assert claim is not None
        failed(database, claim, reason, permanent=True)
    with database.begin() as connection:
        assert instances.failing(connection, 3) == [instance]


def test_a_loss_in_company_blames_nobody_and_sets_each_apart(database: Database) -> None:
    instance = ready_instance(database)
    dispatched(database, accepted(database, 2, max_attempts=1))
    for _ in range(2):
        assert attempts.claim_any(database, instance, lease_s=30) is not None
    assert instances.exited(database, instance, -9, "killed", RETRY)
    rows = every(database, "SELECT state, faults, requested_mode FROM tasks")
    assert [tuple(row) for row in rows] == [("pending", 0, "ephemeral")] * 2


def test_many_are_claimed_and_finished_at_once_and_each_only_by_its_own(database: Database) -> None:
    run = accepted(database, 3, mode=Mode.EPHEMERAL)
    messages = [item.message for item in dispatched(database, run, Mode.EPHEMERAL)]
    one, two = ready_instance(database, Mode.EPHEMERAL), ready_instance(database, Mode.EPHEMERAL)
    requests = [attempts.ClaimRequest(*pair) for pair in zip(messages, (one, one, two), strict=True)]
    claims = attempts.claim_many(database, requests, lease_s=30)
    assert Counter(claim.instance_id for claim in claims) == {one: 1, two: 1}
    assert attempts.claim_many(database, requests, lease_s=30) == []


@pytest.mark.parametrize(
    "deadline",
    [
        datetime(2020, 1, 1, tzinfo=UTC),
        datetime(2099, 1, 1),
        datetime.max.replace(tzinfo=timezone(timedelta(hours=-12))),  # which a reader in UTC could not hold
    ],
)
def test_a_deadline_in_the_past_or_without_a_zone_or_too_far_is_refused(database: Database, deadline: datetime) -> None:
    with pytest.raises(SpecInvalid, match="deadline"):
        submit(database, "a", 1, deadline_at=deadline)


def test_a_provider_that_is_down_is_asked_less_and_less_often(
    dispatcher: Dispatcher, database: Database, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("app.scheduling.pools.time.monotonic", lambda: clock[0])
    world.broken.add("process")
    submit(database, "a", 1)

    def asked() -> int:
        return int(one(database, "SELECT count(*) FROM instances")[0])

    for _ in range(600):  # five minutes
        dispatcher.pass_once()
        clock[0] += 0.5
    assert 8 <= asked() <= 22
    world.broken.clear()
    clock[0] += 31
    dispatcher.pass_once()
    assert len(world.launched) == 1


def live_by_run(database: Database) -> Counter[UUID]:
    live = "a.state IN ('dispatched', 'running')"
    rows = every(database, f"SELECT t.run_id FROM attempts a JOIN tasks t ON t.id = a.task_id WHERE {live}")
    return Counter(row.run_id for row in rows)


def test_a_bounded_run_keeps_to_its_bound_and_lets_others_of_its_line_pass(
    dispatcher: Dispatcher, database: Database
) -> None:
    bounded = submit(database, "alice", 1, replicas=200, max_running=2).run_id
    free = submit(database, "alice", 3).run_id
    while dispatcher.pass_once():
        pass
    assert live_by_run(database) == {bounded: 2, free: 3}
    assert bindings(database) == {(f"quota:run:{bounded}", "alice")}


def test_a_claim_whose_answer_was_lost_is_found_again(database: Database) -> None:
    claim = claimed(database)
    assert attempts.held_by(database, claim.instance_id) == [claim]
    other: UUID = ready_instance(database)
    assert attempts.held_by(database, other) == []


def test_two_dispatchers_at_once_keep_to_a_runs_bound(database: Database, settings: Settings, world: World) -> None:
    bounded = submit(database, "alice", 1, replicas=50, max_running=3).run_id
    pair = [Dispatcher(database, settings, world.launch, world.publish) for _ in range(2)]
    for _ in range(5):
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(Dispatcher.pass_once, pair))
    assert live_by_run(database) == {bounded: 3}
