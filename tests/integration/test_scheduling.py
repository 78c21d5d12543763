"""The dispatcher, the reconciler and the calendar against a real PostgreSQL, with hands that note what they did."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from app.control.calendar import Calendar
from app.errors import InstanceFailed, LaunchUnclear, LimitInvalid, SpecInvalid
from app.ledger import attempts, classes, ends, instances, quotas, results, schedules
from app.ledger.admission import QueuedMessage
from app.ledger.database import Database, Leadership
from app.models.endings import EndReason, RetryPolicy
from app.models.instance import InstanceRequest
from app.models.outcome import Failure
from app.models.spec import Mode
from app.models.states import TaskState
from app.scheduling import dispatcher as dispatcher_module
from app.scheduling.dispatcher import Dispatcher
from app.scheduling.reconciler import Hands, Reconciler
from app.settings import Settings
from tests.building import RETRY, accepted, claimed
from tests.integration.rows import every, write
from tests.services import MakeSettings
from tests.waiting import eventually, in_background


class World:
    """A provider and a broker that remember; either may be broken."""

    def __init__(self) -> None:
        self.launched: list[InstanceRequest] = []
        self.sent: list[QueuedMessage] = []
        self.broken: set[str] = set()
        self.terminated: list[UUID] = []
        self.existing: dict[str, dict[UUID, str]] = {}
        self.nudged: list[UUID] = []
        self.led: list[float] = []

    def launch(self, provider: str, requests: Sequence[InstanceRequest]) -> dict[UUID, str]:
        if provider in self.broken:
            raise InstanceFailed("no capacity")
        self.launched += requests
        if f"{provider} is slow" in self.broken:
            raise LaunchUnclear("timed out")
        return {request.instance_id: "1" for request in requests}

    def publish(self, items: Sequence[QueuedMessage]) -> None:
        if "broker" in self.broken:
            raise ConnectionError("broker away")
        self.sent += items

    @property
    def ephemeral(self) -> list[UUID]:
        return [request.instance_id for request in self.launched if request.mode == Mode.EPHEMERAL]

    def hands(self) -> Hands:
        return Hands(
            lambda: self.existing,
            lambda _p, instance_id, _h: self.terminated.append(instance_id),
            lambda: self.led.append(time.monotonic()),
            self.nudged.extend,
        )


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings(ephemeral_capacity=5, persistent_instances=1, persistent_slots=4, retry_base_s=0.0)


@pytest.fixture
def dispatcher(database: Database, settings: Settings, world: World) -> Dispatcher:
    return Dispatcher(database, settings, world.launch, world.publish)


def test_an_instance_is_asked_for_with_the_size_of_its_class(
    dispatcher: Dispatcher, database: Database, world: World
) -> None:
    classes.set_class(database, "standard", cpus=2.0, memory_bytes=4 << 30, architecture="arm64")
    accepted(database, 1, mode=Mode.EPHEMERAL)
    dispatcher.pass_once()
    assert {(r.cpus, r.memory_bytes, r.gpus, r.architecture) for r in world.launched} == {(2.0, 4 << 30, 0, "arm64")}


def test_no_more_is_admitted_than_there_are_slots(dispatcher: Dispatcher, database: Database, world: World) -> None:
    run = accepted(database, 9, mode=Mode.EPHEMERAL)
    for _ in range(3):
        dispatcher.pass_once()
    assert results.run_status(database, run.run_id).states == {"admitted": 5, "pending": 4}
    assert len(world.ephemeral) == len(world.sent) == 5


def test_persistent_tasks_wait_for_a_standing_instance(
    dispatcher: Dispatcher, database: Database, world: World
) -> None:
    run = accepted(database, 9)
    dispatcher.pass_once()
    assert results.run_status(database, run.run_id).states == {"pending": 9}
    (standing,) = world.launched
    assert instances.ready(database, standing.instance_id)
    dispatcher.pass_once()
    assert results.run_status(database, run.run_id).states == {"admitted": 4, "pending": 5}
    assert len(world.launched) == 1


def test_instances_whose_launch_was_not_answered_are_asked_for_again_and_keep_their_tasks(
    database: Database, settings: Settings, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher_module, "_HOUSEKEEPING_S", 0.2)
    dispatcher = Dispatcher(database, settings, world.launch, world.publish)
    accepted(database, 3, mode=Mode.EPHEMERAL)
    world.broken.add(f"{settings.ephemeral_provider} is slow")
    dispatcher.pass_once()
    asked = set(world.ephemeral)
    assert len(asked) == 3
    (early, *late) = sorted(asked)
    assert instances.ready(database, early), "it was started, and nobody was told"
    give_up = time.monotonic() + 30
    world.broken.clear()
    world.launched.clear()
    while not set(world.ephemeral) >= set(late):
        assert time.monotonic() < give_up
        time.sleep(0.05)
        dispatcher.pass_once()
    assert set(world.ephemeral) == set(late)
    assert asked <= instances.live_ids(database)
    # The one that nobody has a handle of gets it from its provider's list.
    world.existing = {settings.ephemeral_provider: dict.fromkeys(asked, "77")}
    Reconciler(database, settings, world.hands()).sweep()
    assert {one.handle for one in instances.live(database) if one.id == early} == {"77"}
    assert world.terminated == []


def test_a_message_that_nobody_claimed_is_sent_again_after_a_while(
    database: Database, make_settings: MakeSettings, world: World
) -> None:
    impatient = Dispatcher(database, make_settings(republish_s=0.05), world.launch, world.publish)
    accepted(database, 1, mode=Mode.EPHEMERAL)
    impatient.pass_once()
    time.sleep(0.1)
    impatient.pass_once()
    assert [item.message for item in world.sent] == [world.sent[0].message] * 2


def test_instances_that_all_die_at_their_start_are_not_asked_for_without_end(
    dispatcher: Dispatcher, database: Database, world: World
) -> None:
    run = accepted(database, 1, mode=Mode.EPHEMERAL)
    for _ in range(20):
        dispatcher.pass_once()
        for request in world.launched:
            instances.exited(database, request.instance_id, 1, "exit code 1", RETRY)
    assert len(world.ephemeral) == 5
    assert results.run_status(database, run.run_id).states == {"admitted": 1}
    write(database, "UPDATE instances SET requested_at = requested_at - interval '31 s'")
    dispatcher.pass_once()
    assert len(world.ephemeral) == 6


def test_two_dispatchers_admit_nothing_twice(database: Database, settings: Settings, world: World) -> None:
    run = accepted(database, 5, mode=Mode.EPHEMERAL)
    twins = [Dispatcher(database, settings, world.launch, world.publish) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda twin: [twin.pass_once() for _ in range(5)], twins))
    rows = results.results(database, run.task_ids)
    assert [len(row.attempts) for row in rows] == [1] * 5


def test_one_leads_at_a_time_and_another_takes_over(database: Database) -> None:
    first, second = Leadership(database, 99), Leadership(database, 99)
    assert first.held()
    assert first.held()
    assert not second.held()
    first.release()
    eventually(second.held, within_s=10)  # the server notices that a connection has gone in its own time
    second.release()


def test_the_dispatcher_wakes_by_event(dispatcher: Dispatcher, database: Database, world: World) -> None:
    with in_background(dispatcher.run):
        time.sleep(0.3)
        accepted(database, 1, mode=Mode.EPHEMERAL)
        eventually(lambda: world.sent, within_s=5)
    assert len(world.sent) == 1


def _age(database: Database, instance_id: UUID, seconds: float) -> None:
    since = "requested_at = requested_at - make_interval(secs => :s), seen_at = seen_at - make_interval(secs => :s)"
    write(database, f"UPDATE instances SET {since} WHERE id = :i", s=seconds, i=instance_id)


def test_an_instance_that_its_provider_no_longer_has_gives_its_attempts_back(
    database: Database, settings: Settings, world: World
) -> None:
    claim = claimed(database)
    _age(database, claim.instance_id, 60)
    Reconciler(database, settings, world.hands()).sweep()
    assert results.state_of(database, claim.task_id) is TaskState.RUNNING, "a provider that does not answer"
    world.existing = {"process": {}}
    Reconciler(database, settings, world.hands()).sweep()
    (result,) = results.results(database, [claim.task_id])
    assert (result.state, result.attempts[0].state) == (TaskState.PENDING, "lost")
    assert claim.instance_id not in instances.live_ids(database)


def test_an_instance_that_never_becomes_ready_is_replaced(
    database: Database, make_settings: MakeSettings, world: World
) -> None:
    settings = make_settings(boot_timeout_s=0.01, ephemeral_capacity=5, persistent_instances=0)
    dispatcher = Dispatcher(database, settings, world.launch, world.publish)
    accepted(database, 1, mode=Mode.EPHEMERAL)
    dispatcher.pass_once()
    time.sleep(0.05)
    Reconciler(database, settings, world.hands()).sweep()
    dispatcher.pass_once()
    assert len(world.launched) == 2
    assert world.terminated == [world.launched[0].instance_id]


def test_an_attempt_past_its_deadline_is_taken_away(database: Database, settings: Settings, world: World) -> None:
    claim = claimed(database)
    write(database, "UPDATE attempts SET deadline_at = clock_timestamp() - interval '1 s'")
    world.existing = {"process": {claim.instance_id: "1"}}
    Reconciler(database, settings, world.hands()).sweep()
    (result,) = results.results(database, [claim.task_id])
    assert result.attempts[0].end_reason == "deadline"


def test_the_wait_after_a_fault_doubles_up_to_its_cap_and_is_at_least_half_of_it(database: Database) -> None:
    retry, fault = RetryPolicy(base_s=1, cap_s=10), Failure(error="EnvironmentFailed", message="gone")
    longest = [1, 2, 4, 8, 10, 10]
    for before in range(len(longest)):
        claim = claimed(database, max_attempts=10)
        write(database, "UPDATE tasks SET faults = :n WHERE id = :id", n=before, id=claim.task_id)
        ends.fail_many(database, [ends.Failed(claim, EndReason.ENVIRONMENT_ERROR, fault)], retry)
    waits = every(database, "SELECT data->'retry_in_s' FROM events WHERE data ? 'retry_in_s' ORDER BY id")
    for wait_s, most in zip([wait[0] for wait in waits], longest, strict=True):
        assert most / 2 <= wait_s <= most


def _due_schedule(database: Database, *, misfire: str = "skip", since_s: float = 90.0, dataset: str = "demo") -> None:
    submission = {"agent": "nop", "mode": "ephemeral", "selection": {"limit": 1}}
    schedules.add(database, name="nightly", cron="* * * * *", dataset=dataset, submission=submission, misfire=misfire)
    write(database, "UPDATE schedules SET settled_until = clock_timestamp() - make_interval(secs => :s)", s=since_s)


def _on_the_minute() -> datetime:
    return datetime.now(UTC).replace(second=2, microsecond=0)


def test_names_that_cannot_be_shown_are_refused(database: Database) -> None:
    with pytest.raises(SpecInvalid, match="expected a schedule's name"):
        schedules.add(database, name=" ", cron="* * * * *", dataset="demo", submission={}, misfire="skip")
    for name in (" ", "a\x1b[31m"):
        with pytest.raises(LimitInvalid, match="expected the name of a user"):
            quotas.set_quota(database, name, pending=1)


def test_each_due_time_fires_once_however_many_beats_tick(database: Database, settings: Settings) -> None:
    _due_schedule(database)
    now = _on_the_minute()
    beats = [Calendar(settings, database) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        fired = sum(pool.map(lambda beat: beat.tick(now), beats))
    assert fired == 1
    assert len(results.runs(database)) == 1
    assert sum(beat.tick(now) for beat in beats) == 0


@pytest.mark.parametrize(("misfire", "runs"), [("skip", 0), ("once", 1)])
def test_a_time_that_was_missed_follows_its_policy(
    database: Database, settings: Settings, misfire: str, runs: int
) -> None:
    _due_schedule(database, misfire=misfire, since_s=7200)
    late = _on_the_minute() + timedelta(seconds=45)
    assert Calendar(settings, database).tick(late) == runs


def test_a_firing_whose_process_died_is_made_up_for_once(database: Database, settings: Settings) -> None:
    _due_schedule(database)
    (row,) = schedules.all_of(database)
    now = _on_the_minute()
    due = now.replace(second=0)
    assert schedules.claim_due(database, row, [due], until=due) == [due]
    write(database, "UPDATE schedule_fires SET fired_at = fired_at - interval '2 min'")
    calendar = Calendar(settings, database)
    assert calendar.tick(now) == 1
    assert calendar.tick(now) == 0
    assert len(results.runs(database)) == 1


def test_a_schedule_that_cannot_be_read_notes_why_and_stops_no_other(database: Database, settings: Settings) -> None:
    _due_schedule(database)
    write(database, 'UPDATE schedules SET name = \'another\', submission = \'{"agent": "nop", "hue": 1}\'')
    _due_schedule(database)
    assert Calendar(settings, database).tick(_on_the_minute()) == 2
    found = {row.name: (row.last_run, row.last_failure) for row in schedules.all_of(database)}
    assert found["another"][0] is None
    assert "hue" in found["another"][1]
    assert found["nightly"] == (results.runs(database)[0].id, None)


def test_hints_that_the_broker_refused_are_sent_again(dispatcher: Dispatcher, database: Database, world: World) -> None:
    accepted(database, 2, mode=Mode.EPHEMERAL)
    world.broken.add("broker")
    dispatcher.pass_once()
    assert world.sent == []
    world.broken.clear()
    dispatcher.pass_once()
    assert len(world.sent) == 2
    dispatcher.pass_once()
    assert len(world.sent) == 2


def test_a_long_stand_still_is_made_up_for_once(database: Database, settings: Settings) -> None:
    _due_schedule(database, misfire="once", since_s=3 * 86400)  # of each minute: more than one look
    late, calendar = _on_the_minute() + timedelta(seconds=45), Calendar(settings, database)
    assert [calendar.tick(late) for _ in range(3)] == [1, 0, 0]


def test_an_exit_before_the_claim_leaves_the_attempt_for_another(
    dispatcher: Dispatcher, database: Database, world: World
) -> None:
    run = accepted(database, 1, mode=Mode.EPHEMERAL)
    dispatcher.pass_once()
    (first,) = world.ephemeral
    assert instances.exited(database, first, 1, "exit code 1", RETRY)
    dispatcher.pass_once()
    _, second = world.ephemeral
    assert instances.ready(database, second)
    assert attempts.claim(database, world.sent[0].message, second, lease_s=9) is not None
    assert results.state_of(database, run.task_ids[0]) is TaskState.RUNNING
