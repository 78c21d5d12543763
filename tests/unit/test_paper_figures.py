"""The paper's figures: what enters them, the arithmetic between runs and curves, and the page that is made of them."""

from __future__ import annotations

import re
import tomllib

import pytest

from app.models.simulation import Simulation
from app.models.spec import Mode
from bench import control_record
from bench.paper import data, figures, page, plans
from bench.paper.data import World
from bench.paper.point import Outcome, Plan, Record, simulated
from bench.record import RESULTS


@pytest.fixture(scope="module")
def world() -> World:
    return data.world()


def _plan(world: World, tasks: int = 4, slots: int = 2, **changes: object) -> Plan:
    values: dict[str, object] = {"mode": Mode.PERSISTENT, "boots": False, **changes}
    return Plan("example", tasks, world.small, slots, 3600.0, 100.0, **values)  # type: ignore[arg-type]


def _record(
    task: int, instance: int, *, agent_s: float = 3600.0, claimed_s: float = 0.0, boot_s: float = 0.0
) -> Record:
    return Record(task, instance, 0.5, 0.5, boot_s, 100.0, 20.0, agent_s, 10.0, claimed_s, ended=True)


def test_every_gap_of_the_paper_is_decided_and_what_is_named_exists() -> None:
    gaps = tomllib.loads(data.GAPS.read_text())
    assert list(gaps) == [f"G-{number}" for number in range(1, 19)]
    named = [place for one in gaps.values() for place in one["where"]]
    assert [place for place in named if not (page.PAGE.parents[1] / place).exists()] == []
    assert all(one["gap"] and one["decision"] for one in gaps.values())


def test_prices_are_those_that_the_papers_costs_imply(world: World) -> None:
    assert world.small.usd_per_hour == pytest.approx(1005 / 2000 / (100 / 60))
    assert world.central.usd_per_hour == pytest.approx(1470 / 40 / (110 / 60))


def test_one_task_alone_takes_the_papers_time_by_its_agents_mean(world: World) -> None:
    agent_s = world.agent_s(100.0, boots=True, cached=False)
    whole_s = world.boot_s + world.pull_s(world.small) + world.unpack_s + world.start_s + agent_s + world.grade_s
    assert whole_s == pytest.approx(6000.0)
    assert world.pull_s(world.central) * 10 == pytest.approx(world.pull_s(world.small))


def test_a_plan_is_simulated_in_scaled_seconds(world: World) -> None:
    told = simulated(_plan(world, boots=True), world)
    assert isinstance(told, Simulation)
    assert told.boot_s.mean_s == pytest.approx(world.boot_s / 100)
    assert told.run_s.mean_s == pytest.approx(36.0, rel=1e-3)
    assert told.pull_s.mean_s == pytest.approx(world.pull_s(world.small) / 100, rel=1e-3)


def test_an_instance_is_paid_from_its_boot_to_the_end_of_its_last_attempt(world: World) -> None:
    records = [_record(0, 0, boot_s=45.0), _record(1, 0, agent_s=7200.0, claimed_s=30.0, boot_s=45.0), _record(2, 1)]
    outcome = Outcome(_plan(world), records, 1.0, 0)
    assert outcome.instance_s == [45.0 + 30.0 + 7330.0, 3730.0]
    assert outcome.totals_s == [0.5 + 0.5 + 45.0 + 3730.0, 0.5 + 0.5 + 45.0 + 7330.0, 0.5 + 0.5 + 3730.0]


def test_the_attempts_of_one_task_add_up(world: World) -> None:
    records = [_record(0, 0), _record(0, 1, claimed_s=5000.0)]
    assert Outcome(_plan(world), records, 1.0, 0).totals_s == [2 * 3731.0]


def test_a_summary_costs_what_its_instances_are_paid_for(world: World) -> None:
    outcome = Outcome(_plan(world), [_record(n, n // 2) for n in range(4)], 1.0, 0)
    found = figures.summary(outcome, 4)
    assert found.cost_usd.mean == pytest.approx(2 * 3730 / 3600 * world.small.usd_per_hour)
    assert found.total_min == figures.Interval(*[pytest.approx(3731 / 60)] * 3)
    assert found.startup_min.mean == pytest.approx(2.0)


def test_an_interval_holds_the_mean_and_is_the_same_again() -> None:
    values = [float(number) for number in range(100)]
    one = figures.bootstrap(values)
    assert one.low < one.mean < one.high
    assert one == figures.bootstrap(values)
    assert one.high - one.low < figures.bootstrap(values, 10).high - figures.bootstrap(values, 10).low


def test_hosts_are_as_full_as_what_they_hold(world: World) -> None:
    outcome = Outcome(_plan(world), [_record(n, 0) for n in range(2)], 1.0, 0)
    curves = figures.utilisation(outcome, world)
    cpu, memory = curves["cpu"][0], curves["memory"][0]
    assert cpu[-1] == pytest.approx(100 * 2 * world.agent_cores / world.small.cores)
    assert memory[-1] == pytest.approx(100 * 2 * world.agent_memory_bytes / world.small.memory_bytes)
    assert memory[0] == 0.0


def test_the_points_cover_the_papers_axes_and_no_central_job_is_larger_than_its_hosts(world: World) -> None:
    jobs = plans.jobs(world)
    sizes = {series: [job.tasks for job in jobs if (job.figure, job.series) == (plans.SCALING, series)]
             for series in (plans.EPHEMERAL, plans.CENTRAL)}  # fmt: skip
    assert sizes[plans.EPHEMERAL] == list(plans.SIZES)
    assert max(sizes[plans.CENTRAL]) == 2000
    assert all(job.plan.instances * job.plan.slots >= job.plan.tasks for job in jobs), "no task waits for another"


def test_the_page_is_the_one_that_the_kept_figures_make() -> None:
    kept = control_record.load(RESULTS / "paper.json")["figures"]
    assert page.PAGE.read_text() == page.page(kept)
    assert re.findall(r"\| G-(\d+) ", page.PAGE.read_text()) == [str(number) for number in range(1, 19)]
