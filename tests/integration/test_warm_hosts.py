"""What each of several hosts makes ahead: real PostgreSQL, homes of their own."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import text

from app.ledger import accept, classes, host_images
from app.ledger.accept import Accepted, NewRun
from app.ledger.database import Database
from app.ledger.host_images import GONE_S
from app.ledger.measures import now
from app.models.spec import EnvironmentSpec, Mode, Reuse, TaskSpec, TestsGoal
from app.scheduling.dispatcher import Dispatcher
from app.settings import Settings
from app.workers import marks, warm_care
from app.workers.control import Control
from app.workers.host_care import Reporter, host_name
from app.workers.warm_care import Forecast
from tests.building import a_task, dispatched
from tests.integration import rows
from tests.patience import eventually
from tests.services import MakeSettings

Ahead = Callable[[str], list[str | None]]


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings(persistent_instances=0, docker_url="unix:///nowhere.sock")


@pytest.fixture
def home(settings: Settings, tmp_path: Path) -> Callable[[str], Settings]:
    """The settings of a host that shares nothing but the servers."""
    return lambda host: settings.model_copy(update={"home": tmp_path / host, "database_url": settings.database()})


@pytest.fixture
def ahead(home: Callable[[str], Settings], database: Database) -> Ahead:
    """The images of what a host makes ahead, soonest first."""
    return lambda host: [wish.spec.image for wish in Forecast(home(host), database, host)()]


def standing(database: Database, host: str, of: str = "standard", slots: int = 4) -> None:
    rows.an_instance(database, mode="persistent", host=host, resource_class=of, slots=slots)


def submit(
    database: Database,
    *images: str,
    of: str = "standard",
    mode: Mode = Mode.PERSISTENT,
    replicas: int = 1,
) -> Accepted:
    tasks = [a_task(f"of-{i}").model_copy(update={"environment": EnvironmentSpec(image=i)}) for i in images]
    specs = [TaskSpec(task=task, agent="nop", mode=mode, resource_class=of) for task in tasks]
    return accept.accept(database, NewRun(specs, replicas=replicas))


def test_a_host_makes_only_what_tasks_of_its_classes_need(
    database: Database, ahead: Ahead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_care, "_HORIZON", 4)
    monkeypatch.setattr(warm_care, "_EACH", 1)
    classes.set_class(database, "big", pool_max=1)
    standing(database, "alpha")
    standing(database, "beta", of="big")
    submit(database, "small", replicas=9)
    submit(database, "large", of="big", replicas=2)
    assert ahead("alpha") == ["small"] * 4
    assert ahead("beta") == ["large"] * 2, "those of another class, which came first, are not even looked at"
    assert ahead("gamma") == []


def test_hosts_of_one_class_make_different_ones_and_together_the_first_of_the_queue(
    database: Database, ahead: Ahead
) -> None:
    standing(database, "alpha")
    submit(database, "a", "b", replicas=4)
    singles = [f"single-{number}" for number in range(20)]
    submit(database, *singles)
    assert Counter(ahead("alpha")) == Counter({"a": 4, "b": 4} | dict.fromkeys(singles, 1)), "alone, it makes all"
    standing(database, "beta")
    parts = [Counter(ahead(host)) for host in ("alpha", "beta")]
    assert [(part["a"], part["b"]) for part in parts] == [(2, 2), (2, 2)]
    assert parts[0] + parts[1] == Counter({"a": 4, "b": 4} | dict.fromkeys(singles, 1))
    assert all(part.total() > 8 for part in parts)


def test_what_only_one_of_them_has_the_image_of_is_made_there(database: Database, ahead: Ahead) -> None:
    for host in ("alpha", "beta"):
        standing(database, host)
        host_images.report(database, host, [f"of-{host}"])
    submit(database, "of-alpha", "of-beta", replicas=3)
    assert ahead("alpha") == ["of-alpha"] * 3
    assert ahead("beta") == ["of-beta"] * 3


def test_where_nobody_serves_nobody_makes(database: Database, ahead: Ahead, home: Callable[[str], Settings]) -> None:
    classes.set_class(database, "big", pool_max=0, ephemeral_capacity=1)
    submit(database, "a", mode=Mode.PERSISTENT)
    submit(database, "e", mode=Mode.EPHEMERAL)
    assert ahead("alpha") == []
    marks.make(home("alpha"), marks.DISPATCHES)
    assert ahead("alpha") == ["e"], "no pool stands, and none is ever started"
    submit(database, "b", of="big", mode=Mode.EPHEMERAL)
    classes.set_class(database, "big", ephemeral_capacity=0)
    assert ahead("alpha") == ["e"]


def test_the_host_of_the_control_plane_makes_what_is_started_there_and_leaves_the_pool_to_its_hosts(
    database: Database, ahead: Ahead, home: Callable[[str], Settings]
) -> None:
    marks.make(home("control"), marks.DISPATCHES)
    submit(database, "p", replicas=2)
    submit(database, "e", mode=Mode.EPHEMERAL, replicas=2)
    classes.set_class(database, "standard", pool_max=1)
    assert Counter(ahead("control")) == {"p": 2, "e": 2}, "the pool will be started there"
    standing(database, "alpha")
    assert ahead("control") == ["e", "e"]
    assert ahead("alpha") == ["p", "p"]


def test_a_task_that_takes_either_is_made_for_on_both(
    database: Database, ahead: Ahead, home: Callable[[str], Settings]
) -> None:
    control = home("control")
    marks.make(control, marks.DISPATCHES)
    Reporter(control, database, "control").look()
    host_images.report(database, "idle", [])
    standing(database, "alpha", slots=24)
    submit(database, "a", mode=Mode.AUTO, replicas=16)
    shares = len(ahead("alpha")), len(ahead("control"))
    assert sum(shares) == 16
    assert shares[0] in (11, 12, 13), "by their slots"


def test_a_dispatcher_that_leads_elsewhere_now_leaves_nothing_to_this_host(
    database: Database, ahead: Ahead, home: Callable[[str], Settings]
) -> None:
    submit(database, "e", mode=Mode.EPHEMERAL)
    marks.make(home("control"), marks.DISPATCHES)
    assert ahead("control") == ["e"]
    long_ago = time.time() - marks.LASTS_S - 1
    os.utime(home("control").home / "run" / marks.DISPATCHES, (long_ago, long_ago))
    assert ahead("control") == []


def test_a_mark_from_the_future_is_none(ahead: Ahead, database: Database, home: Callable[[str], Settings]) -> None:
    submit(database, "e", mode=Mode.EPHEMERAL)
    marks.make(home("control"), marks.DISPATCHES)
    later = time.time() + 3600
    os.utime(home("control").home / "run" / marks.DISPATCHES, (later, later))
    assert ahead("control") == []


def test_marks_of_hosts_that_are_long_gone_go(settings: Settings) -> None:
    for host in ("old", "new", "away"):
        marks.host_is_here(settings, host)
    folder = settings.home / "run" / "hosts-here"
    for name, age_s in (("old", 2 * 86_400), ("away", 60)):
        os.utime(folder / name, (time.time() - age_s,) * 2)
    assert marks.hosts_here(settings) == {"new"}
    assert {mark.name for mark in folder.iterdir()} == {"new", "away"}


def test_each_host_makes_its_own_of_what_the_tasks_of_a_run_share(database: Database, ahead: Ahead) -> None:
    for host in ("alpha", "beta"):
        standing(database, host)
    environment = EnvironmentSpec(image="lent", reuse=Reuse.SHARED_READONLY)
    goal = TestsGoal(base_commit="c", test_patch="", test_command="true", fail_to_pass=(), pass_to_pass=())
    task = a_task().model_copy(update={"environment": environment, "goal": goal})
    accept.accept(database, NewRun([TaskSpec(task=task, agent="nop", mode=Mode.PERSISTENT)], replicas=6))
    assert (ahead("alpha"), ahead("beta")) == (["lent"], ["lent"])


def test_one_that_is_graded_apart_finds_its_second_environment_where_it_is(database: Database, ahead: Ahead) -> None:
    for host in ("alpha", "beta"):
        standing(database, host)
    goal = TestsGoal(base_commit="c", test_patch="", test_command="true", fail_to_pass=(), pass_to_pass=())
    task = a_task().model_copy(update={"environment": EnvironmentSpec(image="a"), "goal": goal})
    new = NewRun([TaskSpec(task=task, agent="nop", mode=Mode.PERSISTENT)], replicas=4)
    dispatched(database, accept.accept(database, new))
    with database.begin() as connection:
        connection.execute(
            text(
                "UPDATE attempts SET phases = '{\"image_ready\": 1, \"environment_ready\": 1}', state = 'running',"
                " instance_id = (SELECT id FROM instances WHERE host = 'beta')"
            )
        )
    assert (ahead("alpha"), ahead("beta")) == ([], ["a"] * 4)


def test_processes_that_share_a_home_make_for_all_its_hosts(
    database: Database, ahead: Ahead, home: Callable[[str], Settings]
) -> None:
    for host in ("pool-1", "pool-2"):
        standing(database, host)
    submit(database, "a", replicas=6)
    assert ahead("control") == []
    marks.host_is_here(home("control"), "pool-1")
    assert len(ahead("control")) == 3
    marks.host_is_here(home("control"), "pool-2")
    assert len(ahead("control")) == 6


def test_only_the_dispatcher_that_decides_says_that_it_is_here(settings: Settings, database: Database) -> None:
    told: list[str] = []
    stops = [threading.Event(), threading.Event()]

    def start(name: str, stop: threading.Event) -> threading.Thread:
        lead = Dispatcher(database, settings, lambda *_: {}, lambda _: None, None, lambda: told.append(name))
        thread = threading.Thread(target=lead.run, args=(stop,))
        thread.start()
        return thread

    threads = [start("first", stops[0])]
    try:
        eventually(lambda: told.count("first") > 0)
        threads.append(start("second", stops[1]))
        eventually(lambda: told.count("first") > 2)
        assert "second" not in told
        stops[0].set()
        eventually(lambda: "second" in told)
    finally:
        for stop in stops:
            stop.set()
        for thread in threads:
            thread.join(20)


def test_a_control_worker_says_where_it_is_and_that_instances_start_there(
    settings: Settings, database: Database
) -> None:
    control = Control(settings)
    control.start()
    try:
        statement = "SELECT count(*) FILTER (WHERE launches) AS launching FROM hosts WHERE name = :host"
        eventually(lambda: rows.one(database, statement, host=host_name()).launching)
        assert marks.hosts_here(settings) == {host_name()}
    finally:
        control.stop()


def test_a_host_says_whether_instances_start_there_and_how_many_environments_it_has(
    settings: Settings, database: Database
) -> None:
    counts = [0]
    reporter = Reporter(settings, database, "alpha", lambda: counts[0])

    def said() -> tuple[bool, int]:
        reporter.look()
        row = rows.one(database, "SELECT launches, ready FROM hosts WHERE name = 'alpha'")
        return row.launches, row.ready

    assert said() == (False, 0)
    counts[0] = 3
    assert said() == (False, 3)
    marks.make(settings, marks.DISPATCHES)
    assert said() == (True, 3)
    with database.begin() as connection:
        assert now(connection).ready == {"alpha": 3}
        connection.execute(
            text("UPDATE hosts SET seen_at = seen_at - make_interval(secs => :gone)"), {"gone": GONE_S + 1}
        )
        assert now(connection).ready == {}


def test_a_host_that_leaves_takes_its_word_back(settings: Settings, database: Database) -> None:
    marks.make(settings, marks.DISPATCHES)
    stop = threading.Event()
    thread = threading.Thread(target=Reporter(settings, database, "alpha", lambda: 2).run, args=(stop,))
    thread.start()
    statement = "SELECT launches, ready FROM hosts WHERE name = 'alpha' AND launches = :launches"
    eventually(lambda: _row(database, statement, launches=True))
    stop.set()
    thread.join(20)
    assert _row(database, statement, launches=False) == (False, 0)


def _row(database: Database, statement: str, **values: object) -> tuple[object, ...] | None:
    with database.begin() as connection:
        row = connection.execute(text(statement), values).first()
        return None if row is None else tuple(row)
