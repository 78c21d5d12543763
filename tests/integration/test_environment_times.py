"""Phase times of environments: from what attempts record to the table, the metrics and who scrapes them."""

from __future__ import annotations

import socket
from typing import Any
from urllib.request import urlopen
from uuid import UUID

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.control.metrics import LedgerCollector, exposition, serve
from app.errors import SettingsInvalid
from app.ledger import limits
from app.ledger.database import Database
from app.settings import Settings
from tests.integration import phase_times, rows
from tests.integration.phase_times import PhaseTimes
from tests.integration.rows import a_run, a_task, ago, an_attempt, an_instance


def used(
    database: Database, run_id: UUID, phases: dict[str, float], *, path: str = "cold", ago_s: float = 60, **more: Any
) -> UUID:
    """An ended attempt that recorded this; `after`: what was recorded when its environment went.

    It waited as long as its phases took, and a millisecond more between them.
    """
    after, kind, grading = more.pop("after", {}), more.pop("kind", "docker"), more.pop("grading", None)
    came = {"path": path, "phases": phases, "ready_s": sum(phases.values()) + 0.001}
    came["image_by"] = more.pop("image_by", "here")
    told = {"kind": kind, **came}
    torn = {"agent": {**came, "after": phases | after, "reset": more.pop("reset", None)}}
    if grading is not None:
        ready_s = sum(grading.values()) + 0.001
        torn["grading"] = {"path": "cold", "phases": grading, "ready_s": ready_s, "after": grading}
    task_id = a_task(database, run_id, state="succeeded", finished_at=ago(ago_s))
    ended = {"state": "finished", "claimed_at": ago(ago_s + 10), "finished_at": ago(ago_s), "end_reason": "submitted"}
    return an_attempt(database, task_id, environment=told | {"teardown": torn}, **(ended | more))


def by_phase(found: list[PhaseTimes]) -> dict[tuple[str, str], PhaseTimes]:
    return {(one.path, one.phase): one for one in found}


def test_percentiles_are_measured_values(database: Database) -> None:
    run_id = a_run(database)
    for number in range(1, 101):
        used(database, run_id, {"create": number / 1000, "start": 0.01}, after={"teardown": 0.02})
    found = by_phase(phase_times.table(database))
    create = found["cold", "create"]
    assert (create.count, create.p50_s, create.p95_s, create.p99_s) == (100, 0.05, 0.095, 0.099)
    assert found["cold", "ready"].p50_s == pytest.approx(0.061)
    assert found["cold", "teardown"].p99_s == 0.02
    assert [phase for _, phase in found] == ["create", "start", "ready", "teardown"]


def test_an_environment_for_the_grading_counts_too(database: Database) -> None:
    used(database, a_run(database), {"create": 0.1}, path="recycled", grading={"create": 0.3})
    found = by_phase(phase_times.table(database))
    assert (found["recycled", "create"].p50_s, found["cold", "create"].p50_s) == (0.1, 0.3)


def test_what_never_came_is_told_by_a_path_of_its_own(database: Database) -> None:
    run_id = a_run(database)
    used(database, run_id, {"image": 0.01, "create": 0.1})
    failed = {"kind": "oci", "path": "failed", "image_by": "pull", "phases": {"image": 30.0}, "ready_s": 30.1}
    task_id = a_task(database, run_id, state="error", finished_at=ago(5))
    ended = {"state": "finished", "claimed_at": ago(40), "finished_at": ago(5), "end_reason": "infrastructure"}
    an_attempt(database, task_id, **ended, environment={"image": "i", "teardown": {"agent": failed}})
    found = {(one.kind, one.path, one.phase): one for one in phase_times.table(database)}
    assert [found["oci", "failed", phase].p50_s for phase in ("image", "pull", "ready")] == [30.0, 30.0, 30.1]
    assert found["docker", "cold", "image"].p99_s == 0.01
    assert ("docker", "cold", "pull") not in found


def samples(text: str) -> dict[str, float]:
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_exposition_has_the_phases_and_the_counts(settings: Settings, database: Database) -> None:
    used(database, a_run(database), {"create": 0.03, "start": 0.004}, end_reason="max_steps")
    a_task(database, a_run(database))
    an_instance(database, state="busy")
    limits.set_limit(database, "image_pulls:ghcr.io", 3)
    found = samples(exposition(settings, database))
    of_create = "[('kind', 'docker'), ('le', '{}'), ('path', 'cold'), ('phase', 'create')]"
    for bound, count in (("0.025", 0), ("0.05", 1), ("+Inf", 1)):
        assert found["megaflow_environment_phase_seconds_bucket" + of_create.format(bound)] == count
    of_ready = "[('kind', 'docker'), ('path', 'cold'), ('phase', 'ready')]"
    assert found["megaflow_environment_phase_seconds_sum" + of_ready] == pytest.approx(0.035)
    assert found["megaflow_attempts_ended_total[('end_reason', 'max_steps'), ('mode', 'ephemeral')]"] == 1
    assert found["megaflow_tasks[('state', 'pending')]"] == 1
    assert found["megaflow_tasks[('state', 'running')]"] == 0
    assert found["megaflow_instances[('mode', 'ephemeral'), ('state', 'busy')]"] == 1
    assert found["megaflow_waiting_tasks[('mode', 'ephemeral'), ('resource_class', 'standard')]"] == 1
    assert found["megaflow_limit_capacity[('limit', 'image_pulls:ghcr.io')]"] == 3
    assert found["megaflow_limit_held[('limit', 'image_pulls:ghcr.io')]"] == 0
    assert found["megaflow_ledger_up[]"] == 1


def test_what_ended_is_counted_once_and_added_to(settings: Settings, database: Database) -> None:
    collector = LedgerCollector(settings, database, settle_s=0)
    run_id = a_run(database)

    def counts() -> tuple[float, float]:
        families = {family.name: family for family in collector.collect()}
        ended = sum(sample.value for sample in families["megaflow_attempts_ended"].samples)
        created = sum(
            sample.value
            for sample in families["megaflow_environment_phase_seconds"].samples
            if sample.name.endswith("_count") and sample.labels["phase"] == "create"
        )
        return ended, created

    def one_more(create_s: float) -> None:
        rows.begin()  # it ends now, after the last look
        used(database, run_id, {"create": create_s}, ago_s=0)

    assert counts() == (0, 0)
    one_more(0.1)
    assert counts() == (1, 1)
    assert counts() == (1, 1)
    one_more(2000.0)
    assert counts() == (2, 2)


def test_without_a_database_only_that_is_said(settings: Settings) -> None:
    silent = settings.model_copy(update={"database_url": None, "home": settings.home / "nowhere"})
    database = Database("postgresql+psycopg://nobody@/nothing?host=/nowhere")
    (up,) = LedgerCollector(silent, database).collect()
    assert [(sample.name, sample.value) for sample in up.samples] == [("megaflow_ledger_up", 0)]


def test_metrics_are_served_until_stopped(settings: Settings, database: Database) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stop = serve(settings.model_copy(update={"metrics_port": port}), database)
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert b"megaflow_ledger_up 1.0" in answer.read()
        with pytest.raises(SettingsInvalid, match="METRICS_PORT"):
            serve(settings.model_copy(update={"metrics_port": port}), database)
    finally:
        stop()
    with pytest.raises(OSError, match="refused"):
        urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)
    serve(settings, database)()
