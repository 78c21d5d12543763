"""The short form of the chaos suite (`make chaos` runs all of it), and whether its judge sees what it must see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.ledger import admission, attempts, ends, instances
from app.ledger.attempts import Claim
from app.ledger.instances import InstanceDemand
from app.models.endings import EndReason
from app.models.outcome import Phase, Verdict
from app.models.spec import Mode
from tests.chaos import cases
from tests.chaos.case import REGISTRY
from tests.chaos.fixture import Fixture, fixture
from tests.chaos.judge import judge
from tests.chaos.run import run
from tests.chaos.servers import Servers, serving
from tests.often import params
from tests.services import unset

cases.load()
SHORT = [case.name for case in REGISTRY.values() if case.short]
OFTEN = ("kill-before-result", "cancel-reaches-a-running-task")

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    """A PostgreSQL and a Redis that may be killed."""
    with pytest.MonkeyPatch.context() as patch:
        unset(patch)
        with serving() as found:
            yield found


@pytest.mark.parametrize("name", params(SHORT, OFTEN))
def test_nothing_is_lost_or_doubled_or_left_behind(servers: Servers, tmp_path: Path, name: str) -> None:
    verdict = run(REGISTRY[name], servers, tmp_path)
    assert (verdict.lost, verdict.duplicated, verdict.unexpected) == (0, 0, 0), "\n".join(verdict.notes)
    assert verdict.ok == verdict.tasks > 0


@pytest.mark.extra
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["training-loop", "train-command"])
def test_a_training_loop_that_is_killed_commits_every_group_once(servers: Servers, tmp_path: Path, name: str) -> None:
    test_nothing_is_lost_or_doubled_or_left_behind(servers, tmp_path, name)


# --- The judge -------------------------------------------------------------------------------------------------------


def test_the_judge_calls_a_task_without_an_end_lost(servers: Servers, tmp_path: Path) -> None:
    with fixture(servers, tmp_path) as here:
        here.submit(3, mode=Mode.EPHEMERAL)
        verdict = judge("none", here, least_faults=0)
    assert (verdict.lost, verdict.ok) == (3, 0)


def test_the_judge_sees_a_write_that_was_taken_after_the_attempts_end(servers: Servers, tmp_path: Path) -> None:
    with fixture(servers, tmp_path) as here:
        claim = _finished(here)
        here.rows(
            "INSERT INTO events (kind, run_id, task_id, attempt_id) VALUES ('attempt.stored', :run, :task, :attempt)"
            " RETURNING id",
            run=claim.run_id,
            task=claim.task_id,
            attempt=claim.attempt_id,
        )
        verdict = judge("none", here, least_faults=0)
    assert (verdict.duplicated, verdict.ok) == (1, 0)


def test_the_judge_sees_two_attempts_that_ran_at_once(servers: Servers, tmp_path: Path) -> None:
    with fixture(servers, tmp_path) as here:
        claim = _finished(here)
        here.rows(
            "INSERT INTO attempts"
            " (id, task_id, number, state, user_name, mode, resource_class, claimed_at, finished_at)"
            " SELECT gen_random_uuid(), task_id, 0, 'lost', user_name, 'ephemeral', resource_class,"
            " claimed_at - interval '1 s', finished_at FROM attempts WHERE id = :attempt RETURNING id",
            attempt=claim.attempt_id,
        )
        verdict = judge("none", here, least_faults=0)
    assert (verdict.duplicated, verdict.ok) == (1, 0)


def _finished(here: Fixture) -> Claim:
    """One task, carried out by the ledger's own verbs."""
    batch = here.submit(1, mode=Mode.EPHEMERAL)
    with here.database.begin() as connection:
        (item,) = admission.admit(connection, [(task_id, Mode.EPHEMERAL) for task_id in batch.task_ids])
        (instance_id,) = instances.request(
            connection, InstanceDemand("process", Mode.EPHEMERAL, "standard", 1, 1, None)
        )
    assert instances.ready(here.database, instance_id)
    claim = attempts.claim(here.database, item.message, instance_id, lease_s=30)
    assert claim is not None
    attempts.record_phase(here.database, claim, Phase.STORED)
    verdict = Verdict(reward=1.0, counts=True)
    ends.finish(here.database, claim, end_reason=EndReason.SUBMITTED, verdict=verdict, artifacts=[])
    return claim
