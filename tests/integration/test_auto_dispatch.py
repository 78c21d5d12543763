"""The dispatcher chooses the mode of `auto` tasks by what their like took; a trace has what a run took."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from app.cli.simulate_trace import Variant, predicted
from app.errors import LimitInvalid, SpecInvalid
from app.ledger import accept, ends
from app.ledger.accept import Accepted, NewRun
from app.ledger.database import Database
from app.models.outcome import Verdict
from app.models.spec import Mode
from app.scheduling.dispatcher import Dispatcher
from app.settings import Settings
from app.simulation import trace
from tests.building import a_spec, claimed, ready_instance
from tests.integration.command import CommandLine
from tests.integration.rows import every, write
from tests.integration.test_scheduling import World
from tests.services import MakeSettings

_SLOTS = 4


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings(ephemeral_capacity=50, persistent_instances=1, persistent_slots=_SLOTS)


def dispatcher(database: Database, settings: Settings, prices: dict[str, float] | None = None) -> Dispatcher:
    price = None if prices is None else lambda provider, _class: prices.get(provider)
    world = World()
    return Dispatcher(database, settings, world.launch, world.publish, price=price)


def ended(database: Database, mode: Mode, *, started_s: float, held_s: float) -> None:
    """An attempt at an example that waited and ran for so long; one of the pool leaves its instance standing."""
    claim = claimed(database, mode)
    ends.finish(database, claim, verdict=Verdict(reward=1.0, counts=True))
    write(
        database,
        f"UPDATE attempts SET claimed_at = finished_at - interval '{held_s} s',"
        f" dispatched_at = finished_at - interval '{held_s + started_s} s' WHERE id = '{claim.attempt_id}'",
    )


def submitted(database: Database, count: int, *, due_s: float | None = None) -> Accepted:
    deadline = None if due_s is None else datetime.now(UTC) + timedelta(seconds=due_s)
    specs = [a_spec(f"waiting-{number}", mode=Mode.AUTO) for number in range(count)]
    return accept.accept(database, NewRun(specs=specs, deadline_at=deadline))


def modes(database: Database, run: Accepted) -> dict[str, int]:
    found = "SELECT a.mode FROM attempts a JOIN tasks t ON t.id = a.task_id WHERE t.run_id = :run"
    return Counter(row.mode for row in every(database, found, run=run.run_id))


def test_tasks_of_which_nothing_is_known_fill_the_pool_and_then_get_instances(
    database: Database, settings: Settings
) -> None:
    ready_instance(database)
    run = submitted(database, 10)
    dispatcher(database, settings).pass_once()
    assert modes(database, run) == {"persistent": _SLOTS, "ephemeral": 6}


# A slot falls free each 5 s: without a deadline, twelve are no later there than an instance boots.
@pytest.mark.parametrize(("due_s", "alone"), [(None, 20 - _SLOTS - 12), (3600, 0)])
def test_tasks_wait_for_the_cheaper_pool_while_they_end_in_time(
    due_s: float | None, alone: int, database: Database, settings: Settings
) -> None:
    ended(database, Mode.EPHEMERAL, started_s=60, held_s=20)
    ended(database, Mode.PERSISTENT, started_s=0, held_s=20)
    run = submitted(database, 20, due_s=due_s)
    dispatcher(database, settings).pass_once()
    assert modes(database, run) == {"persistent": _SLOTS} | ({"ephemeral": alone} if alone else {})


def test_a_provider_that_costs_next_to_nothing_is_preferred_to_free_slots(
    database: Database, make_settings: MakeSettings
) -> None:
    pool = {"persistent_instances": 1, "persistent_slots": _SLOTS}
    settings = make_settings(ephemeral_capacity=50, ephemeral_provider="docker", **pool)
    ended(database, Mode.EPHEMERAL, started_s=1, held_s=20)
    ended(database, Mode.PERSISTENT, started_s=0, held_s=20)
    run = submitted(database, 3, due_s=3600)
    dispatcher(database, settings, {"docker": 0.001, "process": 1.0}).pass_once()
    assert modes(database, run) == {"ephemeral": 3}


def test_a_trace_has_what_a_run_took_and_fewer_slots_make_it_longer(database: Database, megaflow: CommandLine) -> None:
    for _ in range(4):
        ended(database, Mode.PERSISTENT, started_s=1, held_s=20)
    runs = [row[0] for row in every(database, "SELECT id FROM runs")]
    write(database, "UPDATE tasks SET accepted_at = now() - interval '21 s', finished_at = now()")
    recorded = trace.read(database, runs)
    assert [task.held_s[Mode.PERSISTENT] for task in recorded.tasks] == pytest.approx([20] * 4)
    assert recorded.peak == {Mode.PERSISTENT: 4}
    found = []
    with pytest.raises(LimitInvalid, match="expected capacity for every task, found 4 without"):
        predicted(replace(recorded, peak={}), Variant())
    with pytest.raises(LimitInvalid, match="expected --mode"):
        predicted(recorded, Variant(capacity=4))
    for mode, capacity in (("persistent", 4), ("persistent", 2), ("ephemeral", 1)):
        named = [word for run in runs for word in ("--trace", run)]
        told = megaflow.json("simulate", *named, "--mode", mode, "--capacity", capacity, "--slots", 2)
        found.append(told["predicted"]["makespan_s"])
    assert found == pytest.approx([21, 42, 80], abs=1)
    ended(database, Mode.EPHEMERAL, started_s=1, held_s=20)
    ready = "jsonb_build_object('environment_ready', finished_at)"
    write(database, f"UPDATE attempts SET phases = {ready} WHERE mode = 'ephemeral'")
    runs = [row[0] for row in every(database, "SELECT id FROM runs")]
    assert trace.read(database, runs).tasks[0].held_s[Mode.EPHEMERAL] == pytest.approx(20), "no usual time is known"


def test_a_trace_of_a_run_that_has_not_begun_is_refused(database: Database) -> None:
    with pytest.raises(SpecInvalid, match="attempts that have ended"):
        trace.read(database, [submitted(database, 1).run_id])
