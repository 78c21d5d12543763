"""The paper's figures: the arithmetic between runs and curves, and the page that is made of them."""

import tomllib

import pytest

from app.models.spec import Mode
from bench import control_record
from bench.paper import data, figures, page, plans
from bench.paper.point import Outcome, Plan, Record
from bench.record import RESULTS


def test_the_page_is_what_the_kept_figures_make_and_decides_every_gap_where_it_says() -> None:
    assert page.PAGE.read_text() == page.page(control_record.load(RESULTS / "paper.json")["figures"])
    gaps = tomllib.loads(data.GAPS.read_text())
    assert list(gaps) == [f"G-{number}" for number in range(1, 19)]
    assert all((page.PAGE.parents[1] / place).exists() for one in gaps.values() for place in one["where"])


def test_one_task_alone_takes_the_papers_time_and_no_task_of_a_point_waits_for_another() -> None:
    world = data.world()
    agent_s = world.agent_s(100.0, boots=True, cached=False)
    rest_s = world.boot_s + world.pull_s(world.small) + world.unpack_s + world.start_s + world.grade_s
    assert agent_s + rest_s == pytest.approx(6000.0)
    assert all(job.plan.instances * job.plan.slots >= job.plan.tasks for job in plans.jobs(world))


def test_an_instance_is_paid_from_its_boot_to_its_last_end_and_is_as_full_as_what_it_holds() -> None:
    world = data.world()
    plan = Plan("example", 2, world.small, 2, 3600.0, 100.0, mode=Mode.PERSISTENT)
    records = [Record(n, 0, 0.5, 0.5, 45.0, 100.0, 20.0, 3600.0, 10.0, 30.0 * n, ended=True) for n in range(2)]
    outcome = Outcome(plan, records, 1.0, 0)
    assert (outcome.instance_s, outcome.totals_s) == ([45.0 + 30.0 + 3730.0], [46.0 + 3730.0] * 2)
    found, curves = figures.summary(outcome, 2), figures.utilisation(outcome, world)
    assert found.cost_usd.mean == pytest.approx(3805 / 3600 * world.small.usd_per_hour)
    assert max(curves["cpu"][0]) == pytest.approx(100 * 2 * world.agent_cores / world.small.cores)
