"""What hosts and gateways report of themselves, and what the dispatcher admits because of it; real PostgreSQL."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from app.ledger import host_images, pressure
from app.ledger.database import Database
from app.ledger.pressure import EngineLoad
from app.model_service.gateway import reports
from app.workers import host_care
from tests.integration.gateway_ground import MODEL, an_attempt, ground, says
from tests.integration.rows import one, write
from tests.services import MakeSettings
from tests.waiting import eventually


def known_engines(database: Database) -> list[EngineLoad]:
    with database.begin() as connection:
        return pressure.engines(connection)


async def test_a_gateway_reports_refusals_and_the_use_of_the_cache(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "EVERY_S", 0.05)
    async with ground(make_settings()) as g:
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


def test_what_several_gateways_say_of_one_engine_is_added_up_and_forgotten_when_it_is_old(database: Database) -> None:
    first = EngineLoad("http://e/v1", ("a", "b"), inside=3, waiting=1, queued=2, refused=1, kv_use=0.5)
    second = EngineLoad("http://e/v1", ("b", "c"), inside=5, waiting=0, queued=2, refused=0, kv_use=0.6)
    pressure.report_engines(database, "one", [first])
    pressure.report_engines(database, "two", [second])
    assert known_engines(database) == [EngineLoad("http://e/v1", ("a", "b", "c"), 8, 1, 2, 1, 0.6)]
    write(database, "UPDATE engine_loads SET at = at - interval '1 minute' WHERE gateway = 'one'")
    assert known_engines(database) == [second]


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
