"""The scheduler's decisions."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from app.models.spec import Mode
from app.scheduling import policy
from app.scheduling.policy import Decision, DispatchOrder, Key, QueuedTask, TaskQueue, UserShare

E_STD: Key = (Mode.EPHEMERAL, "standard")
P_STD: Key = (Mode.PERSISTENT, "standard")


def a_line(
    user: str,
    mode: Mode = Mode.EPHEMERAL,
    *,
    count: int = 1,
    priority: int = 0,
    arrival: int = 0,
    more: bool = False,
    resource_class: str = "standard",
) -> TaskQueue:
    tasks = [QueuedTask((user, mode, resource_class, n), priority, arrival + n) for n in range(count)]
    return TaskQueue(user, mode, resource_class, tasks, more=more)


def admit(lines: list[TaskQueue], free: dict[Key, int], **options: Any) -> Decision:
    """With slots of which none is taken, and users who hold nothing unless told otherwise."""
    standings = options.pop("standings", {})
    standings = {line.user_name: standings.get(line.user_name, UserShare()) for line in lines}
    return policy.admit(lines, free, free, standings, **options)


def users(decision: Decision) -> list[str]:
    return [identity[0] for identity, _ in decision.chosen]


classes = st.sampled_from(["standard", "gpu"])
some_lines = st.dictionaries(
    st.tuples(st.sampled_from("abcd"), st.sampled_from(list(Mode)), classes),
    st.tuples(st.integers(0, 12), st.integers(-1, 1), st.integers(0, 50)),
    max_size=10,
).map(
    lambda found: [
        a_line(user, mode, count=count, priority=priority, arrival=arrival, resource_class=name)
        for (user, mode, name), (count, priority, arrival) in found.items()
    ]
)
some_slots = st.dictionaries(st.tuples(st.sampled_from([Mode.EPHEMERAL, Mode.PERSISTENT]), classes), st.integers(0, 10))
some_standings = st.dictionaries(
    st.sampled_from("abcd"),
    st.builds(
        UserShare,
        weight=st.sampled_from([0.5, 1.0, 2.0]),
        running_quota=st.none() | st.integers(0, 6),
        instances_quota=st.none() | st.integers(0, 6),
        spent_up=st.booleans(),
    ),
)


def test_auto_keeps_away_from_a_pool_that_fails() -> None:
    line = replace(a_line("a", Mode.AUTO, count=2), avoids_pool=True)
    decision = admit([line], {E_STD: 1, P_STD: 4})
    assert [mode for _, mode in decision.chosen] == [Mode.EPHEMERAL]
    assert decision.limiting[line.identity] == ("pool-failing:persistent.standard", "slots:ephemeral.standard")
    asked_for = replace(a_line("a", Mode.PERSISTENT), avoids_pool=True)
    assert [mode for _, mode in admit([asked_for], {P_STD: 1}).chosen] == [Mode.PERSISTENT]


def test_a_task_that_must_wait_does_not_hold_up_one_that_need_not() -> None:
    decision = admit([a_line("a"), a_line("b", Mode.PERSISTENT)], {P_STD: 1, E_STD: 0})
    assert users(decision) == ["b"]
    assert decision.limiting == {(Mode.EPHEMERAL, "standard", "a"): ("slots:ephemeral.standard",)}


def test_priority_goes_before_everything_else() -> None:
    lines = [a_line("a", count=3, arrival=0), a_line("b", count=3, priority=1, arrival=100)]
    for order in DispatchOrder:
        assert users(admit(lines, {E_STD: 4}, order=order)) == ["b", "b", "b", "a"]


def test_users_share_by_their_weight_and_by_what_they_hold() -> None:
    lines = [a_line("a", count=50), a_line("b", count=50, arrival=100)]
    assert Counter(users(admit(lines, {E_STD: 10}))) == {"a": 5, "b": 5}
    weighed = admit(lines, {E_STD: 12}, standings={"a": UserShare(weight=1), "b": UserShare(weight=2)})
    assert Counter(users(weighed)) == {"a": 4, "b": 8}
    holding = {"a": UserShare(live=Counter({E_STD: 6}))}
    assert Counter(users(admit(lines, {E_STD: 6}, standings=holding))) == {"b": 6}


def test_fifo_leaves_the_shares_out() -> None:
    lines = [a_line("a", count=50), a_line("b", count=50, arrival=100)]
    assert Counter(users(admit(lines, {E_STD: 10}, order=DispatchOrder.FIFO))) == {"a": 10}


def test_a_quota_holds_up_its_user_and_nobody_else() -> None:
    lines = [a_line("a", count=9), a_line("b", count=9)]
    decision = admit(lines, {E_STD: 9}, standings={"a": UserShare(running_quota=2)})
    assert Counter(users(decision)) == {"a": 2, "b": 7}
    assert decision.limiting[Mode.EPHEMERAL, "standard", "a"] == ("quota:running:a",)
    assert decision.limiting[Mode.EPHEMERAL, "standard", "b"] == ("slots:ephemeral.standard",)


def test_a_user_without_instances_left_may_still_use_the_pool() -> None:
    standing = {"a": UserShare(instances_quota=1)}
    decision = admit([a_line("a", Mode.AUTO, count=5)], {E_STD: 5, P_STD: 2}, standings=standing)
    assert Counter(mode for _, mode in decision.chosen) == {Mode.PERSISTENT: 2, Mode.EPHEMERAL: 1}
    assert decision.limiting[Mode.AUTO, "standard", "a"] == ("slots:persistent.standard", "quota:instances:a")


def test_who_has_spent_all_waits() -> None:
    decision = admit([a_line("a")], {E_STD: 5}, standings={"a": UserShare(spent_up=True)})
    assert decision.chosen == []
    assert decision.limiting[Mode.EPHEMERAL, "standard", "a"] == ("quota:spend:a",)


def test_a_pool_without_instances_is_told_from_one_that_is_full() -> None:
    line = a_line("a", Mode.PERSISTENT)
    assert admit([line], {}).limiting[line.identity] == ("pool:persistent.standard",)
    full = policy.admit([line], {P_STD: 4}, {P_STD: 0}, {"a": UserShare()})
    assert full.limiting[line.identity] == ("slots:persistent.standard",)


@given(some_lines, some_slots, some_standings, st.sampled_from(DispatchOrder), st.integers(0, 20))
def test_no_limit_is_ever_exceeded(
    lines: list[TaskQueue], free: dict[Key, int], standings: dict[str, UserShare], order: DispatchOrder, most: int
) -> None:
    quotas = {user: (s.running_quota, s.instances_quota, s.spent_up) for user, s in standings.items()}
    decision = admit(lines, free, standings=standings, order=order, most=most)
    used = Counter((mode, identity[2]) for identity, mode in decision.chosen)
    assert len(decision.chosen) <= most
    assert all(used[key] <= free.get(key, 0) for key in used)
    for user, (running, instances, spent_up) in quotas.items():
        modes = [mode for identity, mode in decision.chosen if identity[0] == user]
        assert running is None or len(modes) <= running
        assert instances is None or modes.count(Mode.EPHEMERAL) <= instances
        assert not (spent_up and modes)


@given(some_lines, some_slots, some_standings, st.sampled_from(DispatchOrder))
def test_nobody_waits_without_a_limit_that_says_why(
    lines: list[TaskQueue], free: dict[Key, int], standings: dict[str, UserShare], order: DispatchOrder
) -> None:
    everyone = {line.user_name: standings.get(line.user_name, UserShare()) for line in lines}
    decision = policy.admit(lines, free, free, everyone, order=order)
    left = Counter(free)
    left.subtract(Counter((mode, identity[2]) for identity, mode in decision.chosen))
    chosen = {identity for identity, _ in decision.chosen}
    for line in lines:
        if any(task.identity not in chosen for task in line.waiting):
            assert decision.limiting[line.identity]
            # `admit` has noted on the standings what was chosen: the obstacle is real, not one of the moment.
            assert policy.obstacles(line, free, left, everyone[line.user_name])


@given(some_lines, some_slots, some_standings, st.dictionaries(st.integers(0, 12), st.integers(0, 2)))
def test_a_bounded_run_keeps_to_its_room_and_holds_up_no_other(
    lines: list[TaskQueue], free: dict[Key, int], standings: dict[str, UserShare], rooms: dict[int, int]
) -> None:
    run_of = {task.identity: task.arrival % 13 for line in lines for task in line.waiting}
    lines = [
        replace(line, waiting=[task._replace(arrival=task.arrival % 13) for task in line.waiting]) for line in lines
    ]
    decision = admit(lines, free, standings=standings, rooms=rooms)
    chosen = {identity for identity, _ in decision.chosen}
    went = Counter(run_of[identity] for identity in chosen)
    assert all(went[run] <= room for run, room in rooms.items())
    for line in lines:
        waits = [task for task in line.waiting if task.identity not in chosen]
        full = [task for task in waits if task.arrival in rooms and went[task.arrival] == rooms[task.arrival]]
        assert line.identity in decision.limiting or waits == full


@given(some_lines, some_slots)
def test_within_a_line_nobody_is_overtaken(lines: list[TaskQueue], free: dict[Key, int]) -> None:
    decision = admit(lines, free)
    for line in lines:
        went = [identity for identity, _ in decision.chosen if identity in {task.identity for task in line.waiting}]
        assert went == [task.identity for task in line.waiting][: len(went)]


def test_equal_users_with_enough_to_do_end_up_within_one_slot() -> None:
    lines = [a_line(f"user-{n}", count=50, arrival=n) for n in range(7)]
    counts = Counter(users(admit(lines, {E_STD: 100})))
    assert max(counts.values()) - min(counts.values()) <= 1


def test_every_dispatched_ephemeral_attempt_gets_an_instance_and_no_more() -> None:
    gaps = policy.missing_ephemeral(Counter({E_STD: 5, P_STD: 3}), Counter({E_STD: 2}))
    assert gaps == Counter({E_STD: 3})
    assert policy.missing_ephemeral(Counter({E_STD: 1}), Counter({E_STD: 4})) == Counter()


def test_a_pool_follows_its_backlog_between_its_bounds() -> None:
    def target(held: int, waiting: int) -> int:
        return policy.pool_target(held=held, waiting=waiting, slots=4, at_least=1, at_most=5)

    assert [target(0, 0), target(0, 4), target(4, 1), target(3, 1), target(4, 1000)] == [1, 1, 2, 1, 5]
    assert policy.pool_target(held=0, waiting=0, slots=4, at_least=0, at_most=5) == 0


def test_a_full_model_holds_up_its_own_tasks_alone() -> None:
    line = a_line("a", count=6)
    models = ["full", "full", "roomy", None, "full", "roomy"]
    tasks = [task._replace(model=model) for task, model in zip(line.waiting, models, strict=True)]
    decision = admit([replace(line, waiting=tasks)], {E_STD: 10}, rooms={"full": 1, "roomy": 5})
    assert [identity[3] for identity, _ in decision.chosen] == [0, 2, 3, 5]


@given(window=st.floats(1, 1000), live=st.integers(0, 1000), pressed=st.floats(0, 5), least=st.integers(1, 8))
def test_a_window_grows_only_when_used_and_calm_and_shrinks_only_under_pressure(
    window: float, live: int, pressed: float, least: int
) -> None:
    after = policy.next_window(window, live, pressed, least)
    assert after >= least
    if after > max(window, least):
        assert pressed < 1
        assert live + 1 >= window
    if after < window:
        assert pressed >= 1


def test_windows_of_a_host_converge_below_what_it_can_do() -> None:
    """A host whose pressure rises with what runs: never far above its bound, and in use."""
    window, seen = 4.0, []
    for _ in range(60):
        live = int(window)
        window = policy.next_window(window, live, policy.host_pressure(live / 20, 0.5, cpu_most=0.6), least=2)
        seen.append(live)
    assert max(seen) <= 14
    assert min(seen[5:]) >= 8


def test_a_host_is_full_by_its_processors_or_by_its_memory() -> None:
    assert policy.host_pressure(0.3, 0.9, cpu_most=0.6) == 0.5
    assert policy.host_pressure(0.0, 0.05, cpu_most=0.6) == 2.0
    assert policy.host_pressure(0.0, 0.0, cpu_most=0.6) > 1


def test_an_engine_is_full_by_refusals_waits_or_its_cache() -> None:
    def full(**values: Any) -> float:
        calm = {"inside": 10, "waiting": 0, "queued": 0, "refused": 0, "kv_use": None}
        return policy.engine_pressure(**calm | values)

    assert full() == full(inside=0) == 0
    assert full(refused=1) == 1
    assert full(kv_use=0.95) > 1 > full(kv_use=0.85)
    assert full(waiting=2) > 1
    assert full(queued=2) > 1 > full(inside=100, queued=2)
