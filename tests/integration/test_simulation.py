"""Simulated instances against a real control plane: PostgreSQL, Redis, dispatcher, broker, leases, all of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from celery import Celery
from sqlalchemy import text
from typer.testing import CliRunner

from app.celery_app import options
from app.cli import cli
from app.client import MegaFlow, Run
from app.errors import InstanceFailed, LimitInvalid, SpecInvalid, UnknownName
from app.ledger.admission import QueuedMessage
from app.models.endings import EndReason
from app.models.instance import InstanceRequest
from app.models.outcome import Phase, WakeUpMessage
from app.models.simulation import Simulation
from app.models.spec import Mode
from app.simulation import report
from app.simulation.instances import Instance
from app.simulation.slots import SlotTable
from app.stack import private
from app.stack.private import PrivateStack, private_stack
from app.tasks.attempt import publish
from tests.building import a_task, new_id
from tests.services import MakeSettings
from tests.waiting import eventually

CAPACITY = 8
LONGEST_WAIT_S = 60.0
QUICK: dict[str, object] = {
    "ephemeral_capacity": CAPACITY,
    "persistent_instances": 2,
    "persistent_slots": 4,
    "lease_s": 2.0,
    "sweep_s": 0.5,
    "republish_s": 2.0,
    "retry_base_s": 0.05,
    "retry_cap_s": 0.1,
    "boot_timeout_s": 2.0,
    "ephemeral_idle_s": 2.0,
}
"""Everything that takes half a minute in earnest takes a few seconds here."""


@pytest.fixture(scope="module")
def stack() -> Iterator[PrivateStack]:
    """Shared by the tests of this file: each says how instances shall behave, and leaves nothing running."""
    with private_stack(QUICK, simulation=Simulation(), durable=False) as stack:
        yield stack


@pytest.fixture
def flow(stack: PrivateStack) -> Iterator[MegaFlow]:
    stack.provider().behave(Simulation.of(run_s="uniform:0.05,0.2"))
    with MegaFlow(stack.settings) as flow:
        yield flow


def submitted(flow: MegaFlow, count: int, mode: Mode = Mode.EPHEMERAL, name: str = "example") -> Run:
    return flow.enqueue_many([a_task(f"{name}-{n}") for n in range(count)], agent="nop", mode=mode)


def states(run: Run) -> dict[str, int]:
    run.results(LONGEST_WAIT_S)
    return run.status().states


def ask(flow: MegaFlow, query: str, **values: Any) -> Any:
    with flow.database.begin() as connection:
        return connection.execute(text(query), values).scalar()


def ends(run: Run) -> list[EndReason | None]:
    """How all attempts of the run ended."""
    return [attempt.end_reason for result in run.results(LONGEST_WAIT_S) for attempt in result.attempts]


# --- What goes well -------------------------------------------------------------------------------------------------


def test_ephemeral_tasks_are_graded_each_on_an_instance_of_its_own_with_all_phases(
    stack: PrivateStack, flow: MegaFlow
) -> None:
    run = submitted(flow, 30)
    assert states(run) == {"succeeded": 30}
    results = run.results()
    used = [attempt.instance_id for result in results for attempt in result.attempts]
    assert len(set(used)) == len(used) == 30
    seen = set(results[0].attempts[-1].phases)
    assert set(Phase) - {Phase.TORN_DOWN} <= seen
    eventually(lambda: not _ephemeral(flow), "all ephemeral instances have left")
    assert ask(flow, "SELECT count(*) FROM instances WHERE mode = 'ephemeral' AND coalesce(exit_code, 1) <> 0") == 0


def _ephemeral(flow: MegaFlow) -> int:
    query = "SELECT count(*) FROM instances WHERE mode = 'ephemeral' AND state NOT IN ('terminated', 'failed')"
    return int(ask(flow, query))


def test_standing_instances_take_no_more_than_their_slots_and_stay(stack: PrivateStack, flow: MegaFlow) -> None:
    run = submitted(flow, 40, Mode.PERSISTENT)
    assert states(run) == {"succeeded": 40}
    peak = ask(
        flow,
        "SELECT max(n) FROM (SELECT sum(step) OVER (PARTITION BY instance_id ORDER BY at, step) AS n FROM"
        " (SELECT instance_id, claimed_at AS at, 1 AS step FROM attempts WHERE task_id = ANY(:ids) UNION ALL"
        "  SELECT instance_id, finished_at, -1 FROM attempts WHERE task_id = ANY(:ids)) moves) held",
        ids=[handle.task_id for handle in run.handles],
    )
    assert 1 < peak <= 4
    assert ask(flow, "SELECT count(*) FROM instances WHERE mode = 'persistent' AND state = 'ready'") == 2


def test_a_cancelled_attempt_ends_at_once_and_its_seat_is_free_again(stack: PrivateStack, flow: MegaFlow) -> None:
    stack.provider().behave(Simulation.of(hang=1.0, run_s="constant:0.1"))
    run = submitted(flow, CAPACITY, Mode.PERSISTENT)
    eventually(lambda: run.status().states.get("running", 0) == CAPACITY, "all run")
    stack.provider().behave(Simulation.of(run_s="constant:0.1"))
    asked_at = time.monotonic()
    run.cancel()
    assert states(run) == {"cancelled": CAPACITY}
    assert time.monotonic() - asked_at < 10.0  # the lease's renewal would say so, too: an attempt here never ends
    assert states(submitted(flow, CAPACITY, Mode.PERSISTENT)) == {"succeeded": CAPACITY}


def test_what_hangs_keeps_its_lease_for_many_leases(stack: PrivateStack, flow: MegaFlow) -> None:
    stack.provider().behave(Simulation.of(hang=1.0, run_s="constant:0.1"))
    run = submitted(flow, 3)
    eventually(lambda: run.status().states.get("running", 0) == 3, "all run")
    renewed = stack.provider().counts()["renewals"]
    time.sleep(2 * stack.settings.lease_s)
    assert stack.provider().counts()["renewals"] >= renewed + 3 * 4
    run.cancel()
    assert {len(result.attempts) for result in run.results(LONGEST_WAIT_S)} == {1}


# --- What goes wrong ------------------------------------------------------------------------------------------------


def test_a_crash_is_reported_and_costs_an_attempt(stack: PrivateStack, flow: MegaFlow) -> None:
    crashed = stack.provider().counts().get("crashed", 0)
    stack.provider().behave(Simulation.of(run_s="constant:0.1", crash=0.2, seed=1))
    run = submitted(flow, 40)
    found = states(run)
    assert found["succeeded"] + found.get("failed", 0) == 40
    assert ends(run).count(EndReason.LOST) == stack.provider().counts()["crashed"] - crashed > 0
    assert ends(run).count(EndReason.SUBMITTED) == found["succeeded"]
    reported = "SELECT count(*) FROM instances i JOIN attempts a ON a.instance_id = i.id AND a.state = 'lost'"
    assert ask(flow, f"{reported} WHERE i.exit_code = -9") >= ends(run).count(EndReason.LOST)


def test_a_poison_task_stops_after_its_limit_and_takes_no_other_down(stack: PrivateStack, flow: MegaFlow) -> None:
    stack.provider().behave(Simulation.of(run_s="constant:0.1", poison="poison"))
    poison, others = submitted(flow, 1, name="poison"), submitted(flow, 10)
    assert states(poison) == {"failed": 1}
    assert ends(poison) == [EndReason.LOST] * 3
    assert ends(others) == [EndReason.SUBMITTED] * 10


def test_who_vanishes_is_missed_by_the_lease_or_the_providers_list(stack: PrivateStack, flow: MegaFlow) -> None:
    vanished = stack.provider().counts().get("vanished", 0)
    stack.provider().behave(Simulation.of(run_s="constant:0.2", vanish=1.0))
    run = submitted(flow, 4)
    eventually(lambda: stack.provider().counts().get("vanished", 0) >= vanished + 4, "all have vanished")
    stack.provider().behave(Simulation.of(run_s="constant:0.1"))
    assert states(run) == {"succeeded": 4}
    assert ends(run).count(EndReason.LOST) >= 4


def test_who_stood_still_past_its_lease_may_write_no_more(stack: PrivateStack, flow: MegaFlow) -> None:
    before = stack.provider().counts()
    stack.provider().behave(Simulation.of(run_s="constant:0.2", freeze=1.0, freeze_s="constant:6"))
    run = submitted(flow, 3)
    eventually(lambda: stack.provider().counts().get("frozen", 0) >= before.get("frozen", 0) + 3, "all stand still")
    stack.provider().behave(Simulation.of(run_s="constant:0.1"))
    assert states(run) == {"succeeded": 3}
    assert sorted(map(str, ends(run))) == ["lost"] * 3 + ["submitted"] * 3
    refused = before.get("refused", 0) + 3
    eventually(lambda: stack.provider().counts().get("refused", 0) >= refused, "the late writes are refused")


def test_interruptions_use_up_no_retry_and_broken_environments_do(stack: PrivateStack, flow: MegaFlow) -> None:
    stack.provider().behave(Simulation.of(run_s="constant:0.1", interrupted=1.0))
    interrupted = submitted(flow, 1)
    eventually(lambda: _attempts(flow, interrupted) > 5, "more attempts than a task may fail")
    stack.provider().behave(Simulation.of(run_s="constant:0.1"))
    assert states(interrupted) == {"succeeded": 1}
    stack.provider().behave(Simulation.of(run_s="constant:0.1", infrastructure=1.0))
    broken = submitted(flow, 1)
    assert states(broken) == {"failed": 1}
    assert ends(broken) == [EndReason.ENVIRONMENT_ERROR] * 3


def _attempts(flow: MegaFlow, run: Run) -> int:
    return int(ask(flow, "SELECT attempts FROM tasks WHERE run_id = :run", run=run.id))


@pytest.mark.parametrize(
    "fault", ["boot_failure", "never_registers", "launch_throttled", "no_capacity", "reply_lost", "terminate_fails"]
)
def test_a_faulty_provider_costs_time_and_no_task(stack: PrivateStack, flow: MegaFlow, fault: str) -> None:
    also = {"never_registers": 0.2} if fault == "terminate_fails" else {}
    stack.provider().behave(Simulation.of(run_s="constant:0.1", **{**also, fault: 0.25}))
    run = submitted(flow, 10)
    assert states(run) == {"succeeded": 10}
    assert ends(run) == [EndReason.SUBMITTED] * 10
    stack.provider().behave(Simulation.of(run_s="constant:0.1"))
    eventually(lambda: not _ephemeral(flow), "no instance is left in the ledger")
    eventually(lambda: len(stack.provider().alive()) == 2, "nor with the provider, but for the pool")


# --- The host -------------------------------------------------------------------------------------------------------


def test_a_launch_may_be_asked_for_twice(stack: PrivateStack, flow: MegaFlow) -> None:
    provider = stack.provider()
    for _ in range(5):  # one whom nobody asked for goes by itself, now and then before it is asked for twice
        request = InstanceRequest(instance_id=new_id(), mode=Mode.EPHEMERAL)
        first = provider.launch([request])
        if provider.launch([request]) == first:
            break
    else:
        pytest.fail("asked for twice, it was launched twice")
    provider.terminate(request.instance_id, first[request.instance_id], grace_s=0)
    provider.terminate(request.instance_id, first[request.instance_id], grace_s=0)
    eventually(lambda: request.instance_id not in provider.alive(), "it is gone, and the ledger knows")


def test_an_instance_is_ended_at_its_deadline_whatever_it_does(stack: PrivateStack, flow: MegaFlow) -> None:
    stack.provider().behave(Simulation.of(never_registers=1.0))
    request = InstanceRequest(instance_id=new_id(), mode=Mode.EPHEMERAL, lifetime_s=0.2)
    assert request.instance_id in stack.provider().launch([request])
    eventually(lambda: request.instance_id not in stack.provider().alive(), "it is gone")


def test_a_host_that_is_killed_or_told_to_leave_costs_no_task(stack: PrivateStack, flow: MegaFlow) -> None:
    stack.provider().behave(Simulation.of(run_s="constant:1"))
    run = submitted(flow, 16)
    eventually(lambda: run.status().states.get("running", 0) >= 4, "some run")
    stack.kill("simulation")
    stack.restart("simulation")
    eventually(lambda: stack.provider().counts().get("claimed", 0) >= 4, "work goes on")
    eventually(lambda: run.status().states.get("running", 0) >= 1, "some run")
    assert stack.stop("simulation") == 0
    with pytest.raises(InstanceFailed):
        stack.provider().alive()
    assert run.status().states.get("running", 0) == 0  # given back before it left
    stack.restart("simulation")
    assert states(run) == {"succeeded": 16}
    found = set(ends(run))
    assert {EndReason.LOST, EndReason.INTERRUPTED, EndReason.SUBMITTED} <= found


def test_redis_may_lose_everything_and_postgresql_may_restart(stack: PrivateStack, flow: MegaFlow) -> None:
    stack.provider().behave(Simulation.of(run_s="constant:0.3"))
    run = submitted(flow, 24)
    stack.kill("redis")
    for file in (stack.settings.home / "redis").rglob("*.aof"):
        file.unlink()
    stack.restart("redis")
    stack.restart("postgres")
    assert states(run) == {"succeeded": 24}
    assert stack.usage()["postgres"].processes > 1


def test_no_hint_is_taken_without_a_seat_for_it(make_settings: MakeSettings) -> None:
    settings = make_settings()
    celery = Celery("simulated-test", set_as_current=False)
    celery.conf.update(options(settings))
    heard: list[WakeUpMessage] = []
    slots = SlotTable(celery, lambda _, messages: heard.extend(messages))
    instance = Instance(InstanceRequest(instance_id=new_id(), mode=Mode.PERSISTENT, slots=3), "simulated-1", 0.0)
    messages = [WakeUpMessage(attempt_id=new_id(), number=1) for _ in range(10)]
    try:
        publish(celery, [QueuedMessage(message, Mode.PERSISTENT, "standard") for message in messages])
        slots.open(instance, 3)
        with redis.Redis.from_url(settings.redis()) as client:
            eventually(lambda: len(heard) == 3, "three messages are taken")
            time.sleep(1.5)
            assert client.llen("persistent.standard") == 7
            assert heard == messages[:3]
            assert [message for _, message in slots.assign("persistent.standard", heard)] == messages[:3]
            slots.open(instance, 2)
            eventually(lambda: len(heard) == 5, "two more")
            assert client.llen("persistent.standard") == 5
    finally:
        slots.close()


def test_a_hint_whose_seat_has_gone_is_held_for_the_next(make_settings: MakeSettings) -> None:
    settings = make_settings()
    celery = Celery("simulated-test", set_as_current=False)
    celery.conf.update(options(settings))
    slots = SlotTable(celery, lambda _, __: None)
    gone, next_one = (
        Instance(InstanceRequest(instance_id=new_id(), mode=Mode.EPHEMERAL), f"simulated-{n}", 0.0) for n in range(2)
    )
    message = WakeUpMessage(attempt_id=new_id(), number=1)
    try:
        assert slots.open(gone, 1) == []
        slots.shut(gone)
        assert slots.assign("ephemeral.standard", [message]) == []
        assert slots.open(next_one, 1) == [(next_one, message)]
    finally:
        slots.close()


# --- The stack, the report, the command -----------------------------------------------------------------------------


def test_a_private_stack_leaves_neither_processes_nor_files() -> None:
    with private_stack(simulation=Simulation(), durable=False, control_workers=2) as stack:
        home = stack.settings.home
        processes = [psutil.Process(pid) for pid in stack.pids.values()]
        assert set(stack.pids) == {"postgres", "redis", "simulation", "control-1", "control-2"}
        usage = stack.usage()
        assert all(used.memory_bytes > 0 for used in usage.values())
        assert usage["control-1"].cpu_s > 0.1
        with pytest.raises(UnknownName, match="control-1"):
            stack.kill("beat")
        stack.kill("control-2", signal.SIGSTOP)  # what stands still must go, too
    assert not [process for process in processes if process.is_running()]
    assert not home.parent.exists()


def test_the_report_adds_up(stack: PrivateStack, flow: MegaFlow) -> None:
    stack.provider().behave(Simulation.of(run_s="constant:0.1", infrastructure=1.0))
    assert states(submitted(flow, 2)) == {"failed": 2}
    found = report.report(flow.database, CAPACITY)
    assert found.total.ended == found.total.tasks == sum(found.users[name].tasks for name in found.users)
    assert found.total.retries == sum(found.attempt_ends.values()) - found.total.tasks
    assert found.total.not_scored >= 2
    assert 0 < found.utilisation <= 2  # of one mode's capacity, where this file's tests used both
    assert found.total.wait_p50_s is not None
    assert found.total.wait_p99_s is not None
    assert found.total.wait_p50_s <= found.total.wait_p99_s


def _megaflow(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from app.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])


def test_simulate_plans_for_users_and_leaves_nothing_behind() -> None:
    asked = ["--users", "a:5,b:15", "--capacity", "8", "--mode", "persistent", "--run-s", "constant:0.1", "--json"]
    done = _megaflow("simulate", *asked)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["total"]["graded"] == 20
    assert {user: figures["tasks"] for user, figures in found["users"].items()} == {"a": 5, "b": 15}
    assert found["peak"] <= 8
    assert found["instances"] == {"ready": 2}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--run-s", "soon"], "lognormal"),
        (["--fault", "crash=2"], "crash"),
        (["--fault", "crsh=1"], "crash"),
        (["--users", "a:0"], "alice:100"),
        (["--users", "a:1,a:2"], "a:2"),
        (["--mode", "auto"], "persistent"),
        (["--mode", "persistent", "--capacity", "9"], "--capacity 12"),
    ],
)
def test_simulate_refuses_bad_input_before_it_starts_anything(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private.PrivateStack, "spawn", lambda *_: pytest.fail("something was started"))
    done = CliRunner().invoke(cli, ["simulate", *arguments])
    assert isinstance(done.exception, LimitInvalid | SpecInvalid)
    assert said in str(done.exception)


def test_simulate_that_is_told_to_stop_takes_everything_down() -> None:
    command = [
        sys.executable,
        "-c",
        "from app.cli import main; main()",
        "simulate",
        "--tasks",
        "5",
        "--fault",
        "hang=1",
    ]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True) as planning:
        below: list[psutil.Process] = []

        def children() -> bool:
            below[:] = psutil.Process(planning.pid).children()
            return len(below) >= 4

        eventually(children, "its stack is up")
        homes = {process.environ().get("MEGAFLOW_HOME") for process in below if process.name() not in ("postgres",)}
        os.kill(planning.pid, signal.SIGTERM)
        assert planning.wait(60) == 128 + signal.SIGTERM
    eventually(lambda: not [process for process in below if process.is_running()], "its processes are gone")
    assert not [home for home in homes if home and Path(home).exists()]
