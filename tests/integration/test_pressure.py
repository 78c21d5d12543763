"""What hosts and gateways report of themselves, and what the dispatcher admits because of it; real PostgreSQL."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from app.ledger import attempts, explain, host_images, pressure
from app.ledger.accept import Accepted, NewRun, accept
from app.ledger.database import Database
from app.ledger.pressure import EngineLoad, HostPressure
from app.model_service.gateway import engines as reports
from app.models.spec import Mode, ModelChoice
from app.scheduling import pressure as windows
from app.scheduling.dispatcher import Dispatcher
from app.settings import Settings
from app.workers import host_care
from tests.building import a_spec, accepted
from tests.integration.gateway_fixture import MODEL, an_attempt, fixture, says
from tests.integration.rows import an_instance, every, one, write
from tests.integration.test_scheduling import World, world
from tests.services import MakeSettings
from tests.waiting import eventually

__all__ = ["world"]


def known_engines(database: Database) -> list[EngineLoad]:
    with database.begin() as connection:
        return pressure.engines(connection)


async def test_a_gateway_reports_refusals_and_the_use_of_the_cache(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "EVERY_S", 0.05)
    async with fixture(make_settings()) as g:
        await asyncio.to_thread(an_attempt, g.database, "t9")
        g.engine.handler = says(429, times=2)(g.engine)
        assert (await g.ask(token="t9"))[0] == 200
        engine = g.app.routes.engine(g.engine.url)
        told = EngineLoad(g.engine.url, (MODEL,), inside=0, waiting=0, queued=0, refused=2)
        await g.knows(lambda: known_engines(g.database) == [told])
        engine.window.inside, engine.queued, engine.kv_use = 8, 3, 0.93
        await g.knows(lambda: known_engines(g.database)[0].inside == 8)
        [load] = known_engines(g.database)
        assert (load.models, load.queued, load.kv_use) == ((MODEL,), 3, 0.93)
        engine.window.inside = 0


def test_a_host_reports_its_pressure(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_care, "_LOOK_S", 0.05)
    host_images.report(database, "alpha", [])
    stop = threading.Event()
    thread = threading.Thread(target=host_care.keep_reporting, args=(database, "alpha", stop))
    thread.start()
    try:
        eventually(lambda: one(database, "SELECT pressure_at FROM hosts")[0], "a report")
    finally:
        stop.set()
        thread.join()
    row = one(database, "SELECT cores, cpu_pressure, memory_available FROM hosts")
    assert row.cores >= 1
    assert 0 <= row.cpu_pressure <= 1
    assert 0 < row.memory_available < 1


def test_pressure_is_the_share_of_time_in_which_a_process_waited(tmp_path: Path) -> None:
    file = tmp_path / "cpu"
    file.write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=1000000\nfull avg10=0.00 total=0\n")
    gauge = host_care.PressureGauge(file)
    assert gauge.read().cpu == 0
    file.write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=9000000\nfull avg10=0.00 total=0\n")
    assert gauge.read().cpu == 1, "eight seconds in one moment"


@pytest.mark.parametrize(("load", "cpu"), [(0.5, 0.0), (2.0, 0.0), (8.0, 0.75)])
def test_a_kernel_without_pressure_stall_information_is_judged_by_its_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: float, cpu: float
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert host_care.PressureGauge(tmp_path / "none").read().cpu == cpu


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings(host_cpu_most=0.6, persistent_instances=0, ephemeral_capacity=100, retry_base_s=0.0)


@pytest.fixture
def dispatcher(database: Database, settings: Settings, world: World, monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
    for name in ("_LOOK_S", "_REPORT_S", "_SETTLE_S"):
        monkeypatch.setattr(windows, name, 0.0)
    return Dispatcher(database, settings, world.launch, world.publish)


class Hosts:
    """Standing instances that claim what is dispatched, on hosts that report what a test says."""

    def __init__(self, database: Database, dispatcher: Dispatcher, world: World) -> None:
        self.database, self.dispatcher, self.world = database, dispatcher, world
        self.instances = dict[str, UUID]()

    def add(self, host: str, slots: int = 16) -> None:
        host_images.report(self.database, host, [])
        values = {"state": "ready", "slots": slots, "host": host, "provider": "static"}
        self.instances[host] = an_instance(self.database, mode="persistent", **values)

    def report(self, cpu: float = 0.0, memory: float = 0.9, host: str = "alpha") -> None:
        pressure.report_host(self.database, host, HostPressure(2, cpu, memory))

    def admitted(self, host: str = "alpha") -> int:
        """After one look; what it sent out is claimed there. How many run."""
        self.dispatcher.pass_once()
        while attempts.claim_any(self.database, self.instances[host], lease_s=300) is not None:
            pass
        return int(one(self.database, "SELECT count(*) FROM attempts WHERE state = 'running'")[0])

    def end(self, count: int) -> None:
        ended = "state = 'cancelled', finished_at = clock_timestamp(), end_reason = 'cancelled'"
        some = "SELECT id FROM attempts WHERE state = 'running' LIMIT :count"
        write(self.database, f"UPDATE attempts SET {ended} WHERE id IN ({some})", count=count)


@pytest.fixture
def hosts(database: Database, dispatcher: Dispatcher, world: World) -> Hosts:
    return Hosts(database, dispatcher, world)


def why(database: Database, settings: Settings, run: Accepted) -> tuple[list[str], str]:
    """The limits of the run's last task now, and the first reason."""
    found = explain.task(database, settings, run.task_ids[-1]).now
    assert found is not None
    return [bound.limit for bound in found.bounds], found.bounds[0].why if found.bounds else ""


def test_a_host_takes_more_while_it_is_calm_and_no_more_under_pressure(
    hosts: Hosts, database: Database, settings: Settings
) -> None:
    hosts.add("alpha")
    run = accepted(database, 40)
    # Before its pressure with them is known; calm, twice; neither calm nor pressed; under pressure.
    for cpu, admitted in ((0.0, 4), (0.0, 6), (0.0, 8), (0.55, 8), (0.9, 8)):
        hosts.report(cpu=cpu)
        assert hosts.admitted() == admitted
    assert why(database, settings, run) == (
        ["host-pressure:persistent.standard"],
        "host pressure: on alpha processes wait for a CPU 90% of the time, 90% of the memory is available",
    )
    hosts.end(3)
    assert hosts.admitted() == 6, "three quarters of the eight"
    hosts.report(cpu=1.0)
    hosts.end(6)
    assert hosts.admitted() == 4, "two attempts a core go on whatever the processors do"
    hosts.report(memory=0.02)
    hosts.end(4)
    assert hosts.admitted() == 1, "one, while there is no memory"
    for _ in range(10):
        hosts.report()
        count = hosts.admitted()
    assert count == 16
    assert why(database, settings, run)[0] == ["slots:persistent.standard"]


def test_a_host_that_does_not_report_has_its_slots_and_no_more(hosts: Hosts, database: Database) -> None:
    hosts.add("alpha", slots=9)
    accepted(database, 40)
    assert hosts.admitted() == 9


def test_an_old_report_says_nothing(hosts: Hosts, database: Database) -> None:
    hosts.add("alpha", slots=9)
    hosts.report(cpu=1.0)
    accepted(database, 40)
    assert hosts.admitted() < 9
    write(database, "UPDATE hosts SET pressure_at = pressure_at - interval '1 minute'")
    assert hosts.admitted() == 9


def test_tasks_go_to_the_host_that_is_not_under_pressure(
    hosts: Hosts, database: Database, settings: Settings, world: World
) -> None:
    hosts.dispatcher = Dispatcher(database, settings, world.launch, world.publish, image_key=lambda _: "")
    hosts.add("alpha", slots=9)
    hosts.add("beta", slots=6)
    accepted(database, 20)
    hosts.report(cpu=1.0)
    hosts.dispatcher.pass_once()
    rows = every(database, "SELECT queue_host, count(*) AS n FROM attempts GROUP BY 1")
    assert {row.queue_host: row.n for row in rows} == {"alpha": 4, "beta": 6}


def of_model(database: Database, name: str, count: int, mode: Mode = Mode.EPHEMERAL) -> Accepted:
    spec = a_spec(f"of-{name}", mode=mode).model_copy(update={"model": ModelChoice(name=name)})
    return accept(database, NewRun(specs=[spec], replicas=count))


def test_tasks_of_a_full_model_wait_and_others_pass_them(
    dispatcher: Dispatcher, database: Database, settings: Settings
) -> None:
    def report(**values: Any) -> None:
        load = EngineLoad("http://e/v1", ("writer",), **{"inside": 8, "waiting": 0, "queued": 0, "refused": 0} | values)
        pressure.report_engines(database, "g", [load])
        dispatcher.pass_once()

    def running(name: str) -> int:
        with database.begin() as connection:
            return pressure.live_of_models(connection, [name])[name]

    first = of_model(database, "writer", 8)
    report()
    assert running("writer") == 8
    more, _ = of_model(database, "writer", 4), of_model(database, "reader", 3)
    report(refused=3, kv_use=0.97)
    assert (running("writer"), running("reader")) == (8, 3)
    assert why(database, settings, more) == (
        ["model-full:writer"],
        "model full: http://e/v1 has 8 calls, 0 wait, 3 refused in the last seconds, 97% of its KV cache in use",
    )
    write(database, "UPDATE attempts SET state = 'cancelled' WHERE task_id = ANY(:ids)", ids=list(first.task_ids[:3]))
    report(refused=1)
    assert running("writer") == 5, "its window is three quarters of eight, then of five"
    for count in (5, 7, 9):
        report(kv_use=0.2)
        assert running("writer") == count
    assert why(database, settings, more)[0] == []
