"""What `megaflow explain` finds in a real PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from app.ledger import classes, explain, explain_run, pauses
from app.ledger.database import DISPATCHER, Database, Leadership
from app.ledger.stories import CurrentState, RunStory, Share, TaskStory
from app.settings import Settings
from tests.building import new_id
from tests.integration.rows import a_run, a_task, ago, an_attempt, an_instance, insert
from tests.services import MakeSettings

LOST = {
    "state": "lost", "end_reason": "lost", "failure": {"error": "InstanceFailed", "message": "its instance is gone"}
}  # fmt: skip


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings(ephemeral_capacity=2, persistent_instances=1, persistent_slots=2)


@pytest.fixture
def leader(database: Database) -> Iterator[Leadership]:
    """Somebody dispatches."""
    found = Leadership(database, DISPATCHER)
    assert found.held()
    yield found
    found.release()


class Asking:
    """`explain`, for short."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database, self._settings = database, settings

    def task(self, task_id: UUID) -> TaskStory:
        return explain.task(self._database, self._settings, task_id)

    def now(self, task_id: UUID) -> CurrentState:
        found = self.task(task_id).now
        assert found is not None
        return found

    def limits(self, task_id: UUID) -> list[str]:
        return [bound.limit for bound in self.now(task_id).bounds]

    def run(self, run_id: UUID) -> RunStory:
        return explain_run.run(self._database, self._settings, run_id)


@pytest.fixture
def asking(database: Database, settings: Settings) -> Asking:
    return Asking(database, settings)


def live(database: Database, count: int, *, user: str = "bob", mode: str = "ephemeral", **values: object) -> None:
    """Attempts that take places away."""
    run_id = a_run(database, user=user, name="other")
    for _ in range(count):
        task_id = a_task(database, run_id, user=user, mode=mode, state="running", **values)
        an_attempt(database, task_id, user=user, mode=mode, state="running", **values)


def bound(database: Database, limit: str, since: float, until: float | None, **line: object) -> None:
    values = {"user_name": "alice", "mode": "ephemeral", "resource_class": "standard"} | line
    end = None if until is None else ago(until)
    insert(database, "bindings", limit_name=limit, since=ago(since), until=end, **values)


def test_nothing_binds_while_there_is_room_and_somebody_decides(
    database: Database, asking: Asking, leader: Leadership
) -> None:
    live(database, 1)
    now = asking.now(a_task(database, a_run(database)))
    assert (now.doing, now.bounds) == ("waits for its turn", ())


def test_a_user_at_their_quota_of_running_attempts_waits_for_it(database: Database, asking: Asking) -> None:
    classes.set_class(database, "gpu", ephemeral_capacity=10, pool_max=1)
    insert(database, "quotas", user_name="alice", running=2)
    live(database, 1, user="alice")
    task_id = a_task(database, a_run(database), resource_class="gpu")
    assert asking.limits(task_id) == []
    live(database, 1, user="alice", mode="persistent", resource_class="gpu")
    (found,) = asking.now(task_id).bounds
    assert (found.limit, found.used, found.capacity) == ("quota:running:alice", 2, 2)
    assert found.help == "megaflow quota set alice --running 4"


def test_a_user_who_has_spent_their_quota_waits_for_it(database: Database, asking: Asking) -> None:
    insert(database, "quotas", user_name="alice", spend_usd=10.0)
    insert(database, "accounts", user_name="alice", spent_usd=12.5)
    (found,) = asking.now(a_task(database, a_run(database))).bounds
    assert (found.limit, found.used, found.capacity) == ("quota:spend:alice", 12.5, 10.0)
    assert found.help == "megaflow quota set alice --spend 26"


def test_a_pool_without_a_ready_instance_is_named(database: Database, asking: Asking) -> None:
    an_instance(database, mode="persistent", state="booting")
    (found,) = asking.now(a_task(database, a_run(database), mode="persistent")).bounds
    assert (found.limit, found.used, found.capacity) == ("pool:persistent.standard", 0, 1)
    assert "1 on the way" in found.why


def test_a_pool_whose_slots_are_all_taken_is_named(database: Database, asking: Asking) -> None:
    an_instance(database, mode="persistent", slots=2)
    task_id = a_task(database, a_run(database), mode="persistent")
    assert asking.limits(task_id) == []
    live(database, 2, mode="persistent")
    (found,) = asking.now(task_id).bounds
    assert (found.limit, found.used, found.capacity) == ("slots:persistent.standard", 2, 2)
    assert found.help == "megaflow classes set standard --pool-max 2"


def test_auto_waits_only_while_both_kinds_of_place_are_taken(database: Database, asking: Asking) -> None:
    an_instance(database, mode="persistent", slots=1)
    live(database, 2)
    task_id = a_task(database, a_run(database), mode="auto")
    assert asking.limits(task_id) == []
    live(database, 1, mode="persistent")
    assert asking.limits(task_id) == ["slots:persistent.standard", "slots:ephemeral.standard"]


def test_a_class_that_is_gone_or_offers_nothing_is_named(database: Database, asking: Asking) -> None:
    task_id = a_task(database, a_run(database), resource_class="gpu")
    assert asking.limits(task_id) == ["class:gpu"]
    classes.set_class(database, "gpu", pool_max=1)
    (found,) = asking.now(task_id).bounds
    assert (found.limit, found.help) == ("class:gpu", "megaflow classes set gpu --ephemeral 1")
    assert "no capacity for mode ephemeral" in found.why


def test_a_pause_is_named_with_its_reason_and_the_way_out(database: Database, asking: Asking) -> None:
    run_id = a_run(database)
    task_id = a_task(database, run_id)
    pauses.pause(database, "night", "disk is full")
    (found,) = asking.now(task_id).bounds
    assert (found.limit, found.help) == (f"pause:run:{run_id}", f"megaflow resume {run_id}")
    assert found.why == "disk is full"
    assert asking.now(task_id).since == found.since, "since the pause, not since the submission"
    pauses.resume(database, "night")
    assert asking.limits(task_id) == []


def test_a_runs_own_bound_is_named_for_its_tasks_alone(database: Database, asking: Asking, leader: Leadership) -> None:
    run_id = a_run(database, max_running=1)
    an_attempt(database, a_task(database, run_id, state="running", bounded=True), state="running")
    bounded = a_task(database, run_id, bounded=True)
    other = a_task(database, a_run(database, name="day"))
    bound(database, f"quota:run:{run_id}", 60, None)
    (found,) = asking.now(bounded).bounds
    assert (found.limit, found.used, found.capacity, found.since) == (f"quota:run:{run_id}", 1, 1, ago(60))
    assert [line.bounds[0].limit for line in asking.run(run_id).now] == [f"quota:run:{run_id}"]
    assert asking.now(other).doing == "waits for its turn"
    assert asking.task(other).waits == ()


def test_a_delayed_retry_says_until_when_and_why(database: Database, asking: Asking) -> None:
    due = datetime.now(UTC) + timedelta(seconds=30)
    task_id = a_task(database, a_run(database), attempts=1, in_line=False, available_at=due)
    an_attempt(database, task_id, **LOST, dispatched_at=ago(60), finished_at=ago(20))
    story = asking.task(task_id)
    assert story.now is not None
    assert story.now.doing == f"delayed until {due:%H:%M:%S} UTC after attempt 1 ended as lost"
    assert story.tries[0].failure == "InstanceFailed: its instance is gone"
    (line,) = story.tries[1].steps
    assert (line.begin, line.end, line.waits[0].name) == (ago(20), None, "backoff")
    assert line.waits[0].seconds == pytest.approx(line.seconds)


def test_the_place_in_line_follows_priority_run_started_group_and_arrival(database: Database, asking: Asking) -> None:
    first, second = a_run(database), a_run(database, name="later")
    third = a_task(database, first)
    late = a_task(database, second)
    started = a_task(database, first, group_started=True)
    urgent = a_task(database, second, priority=5)
    a_task(database, first, in_line=False)
    a_task(database, first, state="running")
    a_task(database, first, mode="persistent")
    a_task(database, a_run(database, user="bob"), user="bob")
    places = {task_id: asking.now(task_id).place for task_id in (urgent, started, third, late)}
    found = [(place.position, place.length) for place in places.values() if place]
    assert found == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_an_admitted_task_says_which_instances_are_coming(database: Database, asking: Asking) -> None:
    an_instance(database, state="booting", requested_at=datetime.now(UTC) - timedelta(seconds=2))
    task_id = a_task(database, a_run(database), state="admitted", attempts=1)
    an_attempt(database, task_id, published_at=ago(0), dispatched_at=ago(0))
    doing = asking.now(task_id).doing
    assert doing.startswith("waits for an instance: 0 requested, 1 booting, 0 ready; the oldest was asked for 2.")
    assert f"its message was published at {ago(0):%H:%M:%S} UTC" in doing


def test_an_admitted_task_of_the_pool_waits_for_a_worker(database: Database, asking: Asking) -> None:
    an_instance(database, mode="persistent", slots=3)
    live(database, 1, mode="persistent")
    task_id = a_task(database, a_run(database), state="admitted", attempts=1, mode="persistent")
    an_attempt(database, task_id, mode="persistent")
    said = "waits for a free worker: 1 of 3 slots on 1 ready instance(s) in use; its message is not in the broker yet"
    assert asking.now(task_id).doing == said


def test_a_running_task_names_the_semaphore_that_it_waits_for_and_who_holds_it(
    database: Database, asking: Asking
) -> None:
    run_id = a_run(database)
    task_id = a_task(database, run_id, state="running", attempts=1)
    phases = {"accepted": ago(50), "admitted": ago(40), "claimed": ago(30), "image_ready": ago(10)}
    attempt_id = an_attempt(database, task_id, state="running", dispatched_at=ago(40), phases=phases)
    holder = a_task(database, run_id, state="running", attempts=1)
    holding = an_attempt(database, holder, state="running")
    soon = datetime.now(UTC) + timedelta(seconds=60)
    limit = "environment_starts:host-1"
    insert(database, "limits", name=limit, capacity=1)
    for who, asked_at, granted_at in ((attempt_id, ago(9), None), (holding, ago(20), ago(20))):
        row = {"attempt_id": who, "asked_at": asked_at, "granted_at": granted_at, "expires_at": soon}
        insert(database, "semaphore_holders", limit_name=limit, holder=new_id(), **row)
    now = asking.now(task_id)
    assert now.doing.startswith("environment, for ")
    assert now.doing.endswith("waits for environment_starts:host-1")
    (found,) = now.bounds
    assert (found.limit, found.used, found.capacity, found.since) == (limit, 1, 1, ago(9))
    assert found.why == f"held by task {str(holder)[-12:]}"
    assert found.help == "megaflow limits set environment_starts:host-1 2"


def a_finished_task(database: Database, run_id: UUID, **values: object) -> UUID:
    """Accepted 200 s ago, lost in its environment, run again to the end: 100 s in line, 4 of them between the two."""
    times = {"accepted_at": ago(200), "available_at": ago(67), "finished_at": ago(10)}
    ended = {"state": "succeeded", "end_reason": "submitted", "attempts": 2}
    task_id = a_task(database, run_id, **(ended | times | values))
    phases = {"accepted": ago(200), "admitted": ago(104), "claimed": ago(100), "image_ready": ago(90)}
    times = {"dispatched_at": ago(104), "claimed_at": ago(100), "finished_at": ago(70)}
    an_attempt(database, task_id, **LOST, **times, phases=phases, waits={"image_pulls:hub": 6.5})
    names = ("claimed", "image_ready", "environment_ready", "agent_started", "agent_ended", "graded", "stored")
    phases = {name: ago(s) for name, s in zip(names, (62, 61, 55, 54, 24, 14, 10), strict=True)}
    waits = {"environment_starts:h": 2.0, "model_requests:user:alice": 4}
    ended = {"state": "finished", "end_reason": "submitted", "dispatched_at": ago(66), "finished_at": ago(10)}
    an_attempt(database, task_id, number=2, **ended, phases=phases, waits=waits)
    return task_id


def test_a_finished_task_says_where_its_time_went_and_what_it_waited_for(database: Database, asking: Asking) -> None:
    task_id = a_finished_task(database, a_run(database))
    bound(database, "slots:ephemeral.standard", 300, 150)
    bound(database, "quota:running:alice", 150, 80)
    bound(database, "quota:instances:alice", 69, 60)  # for the most part while the retry was not due
    bound(database, "slots:ephemeral.standard", 300, 0, user_name="bob")
    bound(database, "slots:ephemeral.standard", 300, 0, mode="auto")
    bound(database, "slots:ephemeral.standard", 300, 0, resource_class="gpu")

    story = asking.task(task_id)

    assert story.now is None
    assert story.seconds == pytest.approx(190)
    lost, finished = story.tries
    assert lost.steps[0].waits == (Share("slots:ephemeral.standard", 50.0), Share("quota:running:alice", 46.0))
    passed = {"queue": 96.0, "start": 4.0, "image": 10.0, "environment": 20.0}
    assert [(step.phase, step.seconds) for step in lost.steps] == list(passed.items())
    assert lost.steps[2].waits == (Share("image_pulls:hub", 6.5),)
    assert lost.failure == "InstanceFailed: its instance is gone"
    assert finished.steps[0].waits == (Share("backoff", 3.0), Share("quota:instances:alice", 1.0))
    names = ["queue", "start", "image", "environment", "set-up", "agent", "grading", "storing"]
    seconds = [4.0, 4.0, 1.0, 6.0, 1.0, 30.0, 10.0, 4.0]
    assert [(step.phase, step.seconds) for step in finished.steps] == list(zip(names, seconds, strict=True))
    assert finished.steps[3].waits == (Share("environment_starts:h", 2.0),)
    assert finished.steps[5].waits == (Share("model_requests:user:alice", 4.0),)
    assert story.phases[0] == Share("queue", 100.0)
    assert sum(share.seconds for share in story.phases) == pytest.approx(story.seconds)
    assert story.waits[0] == Share("slots:ephemeral.standard", 50.0)


def test_a_run_is_summed_up(database: Database, asking: Asking) -> None:
    run_id = a_run(database, total=7)
    slow = a_finished_task(database, run_id, accepted_at=ago(400), name="slow-one")
    for _ in range(2):
        a_finished_task(database, run_id)
    for _ in range(3):
        a_task(database, run_id)
    a_task(database, run_id, attempts=1, in_line=False, available_at=datetime.now(UTC) + timedelta(minutes=5))
    live(database, 2)
    bound(database, "slots:ephemeral.standard", 300, 150)

    story = asking.run(run_id)

    assert story.states == {"pending": 4, "succeeded": 3}
    assert story.delayed == 1
    by_phase = {spread.phase: spread for spread in story.phases}
    agent = by_phase["agent"]
    assert (agent.count, agent.p50_s, agent.p90_s, agent.max_s, agent.total_s) == (3, 30.0, 30.0, 30.0, 90.0)
    line = by_phase["queue"]
    assert (line.count, line.p50_s, line.p90_s, line.max_s) == (6, 4.0, 296.0, 296.0)
    waits = {share.name: share.seconds for share in story.waits}
    assert waits["slots:ephemeral.standard"] == pytest.approx(150 + 50 + 50)
    assert waits["backoff"] == pytest.approx(9.0)
    assert waits["image_pulls:hub"] == pytest.approx(19.5)
    assert (story.slowest[0].task_id, story.slowest[0].longest_phase) == (slow, "queue")
    assert len(story.slowest) == 5
    assert story.retries == (("lost", 3),)
    (now,) = story.now
    assert (now.waiting, [bound.limit for bound in now.bounds]) == (3, ["slots:ephemeral.standard"])
    assert now.bounds[0].help == "megaflow classes set standard --ephemeral 4"


def test_a_user_at_their_quota_of_instances_waits_for_it_and_others_do_not(
    database: Database, asking: Asking, leader: Leadership
) -> None:
    classes.set_class(database, "standard", ephemeral_capacity=5)
    insert(database, "quotas", user_name="alice", instances=1)
    task_id = a_task(database, a_run(database))
    live(database, 2, user="bob")
    assert asking.limits(task_id) == []
    live(database, 1, user="alice")
    assert asking.limits(task_id) == ["quota:instances:alice"]
    assert asking.limits(a_task(database, a_run(database, user="carol"), user="carol")) == []
