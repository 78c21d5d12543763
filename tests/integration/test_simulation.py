"""Simulated instances against a real control plane: PostgreSQL, Redis, dispatcher, broker, leases, all of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from app.cli import cli
from app.client import MegaFlow, Run
from app.errors import InstanceFailed, LimitInvalid, SpecInvalid
from app.models.endings import EndReason
from app.models.outcome import Phase
from app.models.simulation import Simulation
from app.models.spec import Mode
from app.stack import private
from app.stack.private import PrivateStack, private_stack
from tests.building import a_task
from tests.often import params
from tests.waiting import eventually

CAPACITY = 8
LONGEST_WAIT_S = 60.0
QUICK: dict[str, object] = {
    "ephemeral_capacity": CAPACITY, "persistent_instances": 2, "persistent_slots": 4, "lease_s": 2.0, "sweep_s": 0.5,
    "republish_s": 2.0, "retry_base_s": 0.05, "retry_cap_s": 0.1, "boot_timeout_s": 2.0, "ephemeral_idle_s": 2.0,
}  # fmt: skip
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
    return flow.database.sql(query, values).scalar()


def ends(run: Run) -> list[EndReason | None]:
    """How all attempts of the run ended."""
    return [attempt.end_reason for result in run.results(LONGEST_WAIT_S) for attempt in result.attempts]


def test_ephemeral_tasks_are_graded_each_on_an_instance_of_its_own_with_all_phases(
    stack: PrivateStack, flow: MegaFlow
) -> None:
    run = submitted(flow, 30)
    assert states(run) == {"succeeded": 30}
    results = run.results()
    used = [attempt.instance_id for result in results for attempt in result.attempts]
    assert len(set(used)) == len(used) == 30
    seen = set(results[0].attempts[-1].phases)
    assert set(Phase) - {Phase.TORN_DOWN, Phase.GRADING_QUEUED, Phase.GRADING_STARTED} <= seen
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


FAULTS = ["boot_failure", "never_registers", "launch_throttled", "no_capacity", "reply_lost", "terminate_fails"]


@pytest.mark.parametrize("fault", params(FAULTS, ["never_registers", "no_capacity", "reply_lost"]))
def test_a_faulty_provider_costs_time_and_no_task(stack: PrivateStack, flow: MegaFlow, fault: str) -> None:
    also = {"never_registers": 0.2} if fault == "terminate_fails" else {}
    stack.provider().behave(Simulation.of(run_s="constant:0.1", **{**also, fault: 0.25}))
    run = submitted(flow, 10)
    assert states(run) == {"succeeded": 10}
    assert ends(run) == [EndReason.SUBMITTED] * 10
    stack.provider().behave(Simulation.of(run_s="constant:0.1"))
    eventually(lambda: not _ephemeral(flow), "no instance is left in the ledger")
    eventually(lambda: len(stack.provider().alive()) == 2, "nor with the provider, but for the pool")


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


_MEGAFLOW = (sys.executable, "-c", "from app.cli import main; main()")


@pytest.mark.extra
def test_simulate_plans_and_leaves_nothing_behind() -> None:
    asked = ["--tasks", "20", "--capacity", "8", "--mode", "persistent", "--run-s", "constant:0.1", "--json"]
    done = subprocess.run([*_MEGAFLOW, "simulate", *asked], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["total"]["graded"] == 20
    assert found["peak"] <= 8
    assert found["instances"] == {"ready": 2}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--run-s", "soon"], "lognormal"),
        (["--fault", "crash=2"], "crash"),
        (["--fault", "crsh=1"], "crash"),
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


@pytest.mark.extra
def test_simulate_that_is_told_to_stop_takes_everything_down() -> None:
    with subprocess.Popen(
        [*_MEGAFLOW, "simulate", "--tasks", "5", "--fault", "hang=1"], stderr=subprocess.DEVNULL, start_new_session=True
    ) as planning:
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
