"""Grading as a stage of its own: queued when the agent ends, graded by a worker that may die, ended exactly once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from uuid import UUID

import pytest

from app import evaluation
from app.datasets.selection import Selection
from app.errors import StaleWriter
from app.evaluation import Submission
from app.grading import grader_for
from app.ledger import attempts, ends, gradings, instances, receipts, results, tasks, waiting
from app.ledger.accept import NewRun, accept
from app.ledger.attempts import Claim
from app.ledger.audit import look
from app.ledger.audit_checks import CHECKS
from app.ledger.database import Database
from app.ledger.gradings import GradingClaim
from app.ledger.instances import INTERRUPTED_EXIT
from app.models.endings import EndReason
from app.models.instance import InstanceMode
from app.models.outcome import AgentResult, ArtifactKind, Failure, Phase, Verdict, WakeUpMessage
from app.models.spec import EnvironmentKind, EnvironmentSpec, Mode, TaskSpec
from app.scheduling import dispatcher as dispatcher_module
from app.scheduling.dispatcher import Dispatcher
from app.settings import Settings
from app.workers import grader, services
from app.workers.attempt import carry_out
from app.workers.lease import StopToken
from tests.building import RETRY, a_spec, claim_of, claimed, failed, ready_instance
from tests.integration.rows import every, facts, one, write
from tests.integration.test_scheduling import World
from tests.services import MakeSettings

RESULT = AgentResult(end_reason=EndReason.SUBMITTED)
VERDICT = Verdict(reward=1.0, counts=True)
BROKEN = Failure(error="GradingFailed", message="broken")


@dataclass
class Queued:
    """An attempt whose agent has ended, and the message of its grading."""

    database: Database
    claim: Claim

    @property
    def message(self) -> WakeUpMessage:
        return WakeUpMessage(attempt_id=self.claim.attempt_id, number=self.claim.number)

    def take(self, instance_id: UUID | None = None) -> GradingClaim | None:
        return gradings.claim(self.database, self.message, instance_id or a_grader(self.database), lease_s=30)

    def grading(self, instance_id: UUID | None = None) -> GradingClaim:
        found = self.take(instance_id)
        assert found is not None
        return found

    def taken(self, instance_id: UUID | None = None) -> Claim:
        return self.grading(instance_id).claimed

    def finish(self, by: Claim) -> None:
        ends.finish(self.database, by, verdict=VERDICT)

    @property
    def states(self) -> tuple[str, str, str | None]:
        """Of the attempt and of its task, and why that ended."""
        row = one(
            self.database,
            "SELECT a.state, t.state AS task, t.end_reason FROM attempts a JOIN tasks t ON t.id = a.task_id"
            " ORDER BY a.number DESC LIMIT 1",
        )
        return row.state, row.task, row.end_reason

    @property
    def left(self) -> int:
        """Rows of gradings and leases."""
        return int(one(self.database, "SELECT (SELECT count(*) FROM gradings) + count(*) AS n FROM leases").n)


@pytest.fixture(params=[Mode.EPHEMERAL, Mode.PERSISTENT])
def queued(database: Database, request: pytest.FixtureRequest) -> Iterator[Queued]:
    made = Queued(database, claimed(database, request.param))
    gradings.hand_over(database, made.claim, RESULT, waits={"engine": 2.0})
    yield made
    if made.states[1] in ("succeeded", "failed", "cancelled"):
        assert made.left == 0


def a_grader(database: Database) -> UUID:
    return ready_instance(database, InstanceMode.GRADING)


def test_the_slot_is_free_when_the_agent_has_ended(queued: Queued, settings: Settings) -> None:
    with queued.database.begin() as connection:
        seen = waiting.occupancy(connection)
    assert seen.live.total() == 0
    assert seen.by_user.total() == 0
    assert seen.unfinished_gradings == {"standard": 1}
    now = results.progress_of(queued.database, [queued.claim.run_id])
    assert (now.total, now.waiting, now.starting, now.ended, now.running) == (1, 0, 0, 0, {"grading": 1})
    assert queued.states == ("grading", "running", None)
    assert every(queued.database, "SELECT 1 FROM leases") == []
    assert look(queued.database, settings).findings == ()
    with pytest.raises(StaleWriter):
        queued.finish(queued.claim)
    with pytest.raises(StaleWriter):
        gradings.hand_over(queued.database, queued.claim, RESULT)


def test_a_message_that_comes_twice_gives_one_verdict(queued: Queued) -> None:
    first = a_grader(queued.database)
    claim = queued.taken(first)
    assert queued.take() is None
    assert claim.task_id == queued.claim.task_id
    again = queued.taken(first)  # whose answer had been lost: this instance has not got it in hand
    with pytest.raises(StaleWriter):
        queued.finish(claim)
    queued.finish(again)
    with pytest.raises(StaleWriter):
        queued.finish(again)
    assert queued.take() is None
    assert queued.states == ("finished", "succeeded", "submitted")


def test_an_ephemeral_instance_may_go_before_the_grading_ends(queued: Queued) -> None:
    assert instances.exited(queued.database, queued.claim.instance_id, 0, "it left", RETRY)
    claim = queued.taken()
    queued.finish(claim)
    assert queued.states == ("finished", "succeeded", "submitted")


def test_another_grader_goes_on_when_one_is_lost_and_the_lost_one_writes_no_more(queued: Queued) -> None:
    first, second = a_grader(queued.database), a_grader(queued.database)
    lost = queued.taken(first)
    assert instances.exited(queued.database, first, -9, "killed", RETRY)
    assert queued.states[:2] == ("grading", "running")
    claim = queued.taken(second)
    assert attempts.renew(queued.database, [lost.attempt_id], lease_s=30, instance_id=first) == {}
    for stale in (lost, queued.claim):
        with pytest.raises(StaleWriter):
            attempts.record_phase(queued.database, stale, Phase.GRADED)
        with pytest.raises(StaleWriter):
            queued.finish(stale)
    with pytest.raises(StaleWriter):
        gradings.put_back(queued.database, lost, None, RETRY)
    assert attempts.renew(queued.database, [claim.attempt_id], lease_s=30, instance_id=second) == {
        claim.attempt_id: None
    }
    queued.finish(claim)
    assert one(queued.database, "SELECT count(*) AS n FROM attempts").n == 1
    assert queued.states == ("finished", "succeeded", "submitted")


def test_a_lapsed_lease_and_a_passed_deadline_give_it_to_another(queued: Queued) -> None:
    for what in ("leases SET expires_at", "attempts SET deadline_at"):
        queued.taken()
        write(queued.database, f"UPDATE {what} = clock_timestamp() - interval '1 s'")
        with queued.database.begin() as connection:
            assert waiting.reclaim_lapsed(connection, RETRY) == []
    row = one(queued.database, "SELECT g.faults, a.deadline_at, a.phases FROM gradings g, attempts a")
    assert (row.faults, row.deadline_at) == (2, None)
    assert "grading_started" not in row.phases


def test_after_three_faults_the_attempt_ends_as_infrastructure_and_is_tried_as_a_whole(queued: Queued) -> None:
    for _ in range(gradings.MOST_FAULTS - 1):
        found = a_grader(queued.database)
        queued.taken(found)
        assert instances.exited(queued.database, found, -9, "killed", RETRY)
        assert queued.states[0] == "grading"
    assert not gradings.put_back(queued.database, queued.taken(), BROKEN, RETRY)
    last = one(queued.database, "SELECT instance_id FROM gradings").instance_id
    assert instances.exited(queued.database, last, -9, "killed", RETRY)
    assert queued.states == ("lost", "pending", None)
    row = one(queued.database, "SELECT a.end_reason, t.faults FROM attempts a, tasks t")
    assert (row.end_reason, row.faults) == ("infrastructure", 1)
    assert queued.left == 0


def test_what_never_came_to_a_score_is_graded_once_more_as_an_attempt_without_an_agent(queued: Queued) -> None:
    failed(queued.database, queued.taken(), EndReason.GRADING_ERROR, permanent=True)
    began = "jsonb_build_object('agent_started', claimed_at + interval '1 ms')"
    times = """'{"kind": "oci", "path": "started", "phases": {"start": 0.1}, "teardown": {"agent": {}}}'"""
    write(queued.database, f"UPDATE attempts SET phases = phases || {began}, environment = environment || {times}")
    assert queued.states == ("error", "failed", "grading_error")
    assert gradings.queue_again(queued.database, [queued.claim.attempt_id]) == {queued.claim.task_id}
    assert gradings.queue_again(queued.database, [queued.claim.attempt_id]) == set(), "it has gone on"
    (twice,) = (check for check in CHECKS if check.name == "instance.used_twice")
    assert every(queued.database, twice.query, recent=3600) == []
    new = one(queued.database, "SELECT a.*, g.submission FROM attempts a JOIN gradings g ON g.attempt_id = a.id")
    assert (new.state, new.number, new.submission["end_reason"]) == ("grading", 2, "submitted")
    assert not {"phases", "teardown"} & new.environment.keys(), "its agent's environment is counted once"
    queued.claim = replace(queued.claim, attempt_id=new.id, number=2)
    queued.finish(queued.taken())
    states = every(queued.database, "SELECT a.state, t.state AS task FROM attempts a, tasks t ORDER BY a.number")
    assert [tuple(row) for row in states] == [("error", "succeeded"), ("finished", "succeeded")]
    now = results.progress_of(queued.database, [queued.claim.run_id])
    assert (now.total, now.ended) == (1, 1)


def test_what_is_graded_once_more_starts_no_agent_and_has_no_old_deadline(queued: Queued) -> None:
    failed(queued.database, queued.taken(), EndReason.GRADING_ERROR, permanent=True)
    write(queued.database, "UPDATE tasks SET max_attempts = 3, deadline_at = clock_timestamp() - interval '1 h'")
    assert gradings.queue_again(queued.database, [queued.claim.attempt_id])
    assert one(queued.database, "SELECT deadline_at FROM tasks").deadline_at is None
    new = one(queued.database, "SELECT attempt_id AS id FROM gradings").id
    queued.claim = replace(queued.claim, attempt_id=new, number=2)
    for _ in range(gradings.MOST_FAULTS):
        gradings.put_back(queued.database, queued.taken(), BROKEN, RETRY)
    last = one(queued.database, "SELECT instance_id FROM gradings").instance_id
    instances.exited(queued.database, last, -9, "", RETRY)
    assert one(queued.database, "SELECT state FROM tasks").state == "failed"


def test_a_grader_that_is_told_to_stop_gives_it_back_without_a_fault(queued: Queued) -> None:
    for _ in range(2 * gradings.MOST_FAULTS):
        leaving = a_grader(queued.database)
        assert gradings.put_back(queued.database, queued.taken(leaving), None, RETRY)
        queued.taken(leaving)
        assert instances.exited(queued.database, leaving, INTERRUPTED_EXIT, "told to", RETRY)
    queued.finish(queued.taken())


def test_no_more_messages_are_on_their_way_than_graders_will_soon_take(database: Database) -> None:
    for _ in range(9):
        gradings.hand_over(database, claimed(database), RESULT)
    a_grader(database)  # with four slots
    with database.begin() as connection:
        due = gradings.unpublished(connection, 60.0)
        assert len(due) == 8
        gradings.mark_published(connection, [item.message.attempt_id for item in due])
        assert gradings.unpublished(connection, 60.0) == []
        assert len(gradings.unpublished(connection, 0.0)) == 8, "those that were lost on their way"


def test_the_next_grading_is_of_the_user_with_the_fewest_in_hand(database: Database) -> None:
    for user in ["many"] * 12 + ["few"] * 2:
        one_more = claimed(database)
        write(database, f"UPDATE attempts SET user_name = '{user}' WHERE id = '{one_more.attempt_id}'")
        gradings.hand_over(database, one_more, RESULT)
    a_grader(database)
    with database.begin() as connection:
        due = [item.message.attempt_id for item in gradings.unpublished(connection, 60.0)]
    users = every(database, f"SELECT user_name FROM attempts WHERE id = ANY(ARRAY{[str(i) for i in due]}::uuid[])")
    assert sorted(row.user_name for row in users) == ["few"] * 2 + ["many"] * 6


def test_cancelled_while_it_waits_it_ends_at_once(queued: Queued) -> None:
    assert tasks.cancel(queued.database, [queued.claim.task_id]) == []
    assert queued.states == ("cancelled", "cancelled", "cancelled")
    assert queued.take() is None


@pytest.mark.parametrize("how", ["hears", "dies"])
def test_cancelled_while_it_is_graded_its_grader_is_told(queued: Queued, how: str) -> None:
    found = a_grader(queued.database)
    claim = queued.taken(found)
    assert tasks.cancel(queued.database, [claim.task_id]) == [claim.attempt_id]
    told = attempts.renew(queued.database, [claim.attempt_id], lease_s=30, instance_id=found)
    assert told == {claim.attempt_id: EndReason.CANCELLED}
    if how == "hears":
        failed(queued.database, claim, EndReason.CANCELLED)
    else:
        instances.exited(queued.database, found, -9, "killed", RETRY)
    assert queued.states[1:] == ("cancelled", "cancelled")
    assert queued.left == 0


def test_graders_are_started_from_zero_and_leave_when_nothing_is_graded(
    database: Database, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher_module, "_HOUSEKEEPING_S", 0.0)
    world = World()
    given = make_settings(persistent_instances=0, pool_cooldown_s=0.0, grading_instances=2, grading_slots=1)
    dispatcher = Dispatcher(database, given, world.launch, world.publish)
    claimed(database)
    dispatcher.pass_once()
    assert world.launched == [], "nothing that runs will need a grader"
    claims = [claim_of(database, accept(database, NewRun(specs=[graded_apart(n)]))) for n in range(3)]
    dispatcher.pass_once()
    (first,) = world.launched
    assert (first.mode, first.queue, first.slots) == (InstanceMode.GRADING, "grading.standard", 1)
    for claim in claims:
        gradings.hand_over(database, claim, RESULT)
    dispatcher.pass_once()
    assert len(world.launched) == 2, "as many as may be, for three that wait"
    assert {item.message.attempt_id for item in world.sent} == {claim.attempt_id for claim in claims}
    world.sent.clear()
    dispatcher.pass_once()
    assert world.sent == [], "messages are on their way"
    assert all(instances.ready(database, request.instance_id) for request in world.launched)
    for claim in claims:
        found = Queued(database, claim)
        found.finish(found.taken(first.instance_id))
    dispatcher.pass_once()
    dispatcher.pass_once()
    states = "SELECT state FROM instances WHERE mode = 'grading' ORDER BY state"
    assert [row.state for row in every(database, states)] == ["draining", "draining"]


def graded_apart(number: int) -> TaskSpec:
    spec = a_spec(f"apart-{number}", mode=Mode.PERSISTENT)
    goal = spec.task.goal.model_copy(update={"environment": EnvironmentSpec(image="example")})
    return spec.model_copy(update={"task": spec.task.model_copy(update={"goal": goal})})


def of_the_oracle(database: Database, settings: Settings) -> Claim:
    asked = {"dataset": "demo", "agent": "oracle", "selection": Selection(only=("pallets__itsdangerous-1",))}
    specs = evaluation.specs_of(Submission(**asked, environment=EnvironmentKind.LOCAL), settings)
    return claim_of(database, accept(database, NewRun(specs=specs)))


def test_what_is_graded_apart_looks_as_what_is_graded_in_place(database: Database, settings: Settings) -> None:
    claim = of_the_oracle(database, settings)
    here = services.build(settings, pooled=True, max_idle=1)
    assert carry_out(claim, here, StopToken()) is EndReason.SUBMITTED
    queued = Queued(database, claim)
    assert queued.states == ("grading", "running", None)
    assert "torn_down" not in one(database, "SELECT phases FROM attempts").phases
    taken = queued.grading()
    assert grader.carry_out(taken, here, StopToken()) == "submitted"
    here.close()
    row = one(database, "SELECT * FROM attempts")
    assert (row.state, row.verdict["reward"]) == ("finished", 1.0)
    order = [phase for phase in Phase if phase in row.phases]
    assert order == sorted(order, key=lambda phase: row.phases[phase])
    assert {Phase.GRADING_QUEUED, Phase.GRADING_STARTED, Phase.GRADED, Phase.STORED, Phase.TORN_DOWN} <= set(order)
    assert {"agent", "grading"} <= row.environment["teardown"].keys()
    assert row.environment["graded_on"] == str(taken.claimed.instance_id)
    kinds = {row.kind: row.key for row in every(database, "SELECT kind, key FROM artifacts")}
    assert kinds.keys() == {kind.value for kind in ArtifactKind} - {"handed_over", "step_diffs"}
    assert all(kinds[kind] for kind in ("patch", "verdict", "test_report"))
    recording = here.store.get(kinds["terminal"]).decode()
    stages = [row[2] for row in json.loads(recording.partition("\n")[0])["commands"]]
    assert {"patch", "agent"} <= set(stages[:-1])
    assert stages[-1] == "grading"
    assert [kind for kind, _ in facts(database)].count("attempt.finished") == 1
    standing = [line for line in receipts.of_run(database, claim.run_id).objects if line.destroyed_at is None]
    assert standing == []
    assert look(database, settings).findings == ()


def test_a_broken_grading_costs_a_grading_and_no_rollout(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = of_the_oracle(database, settings)
    here = services.build(settings, pooled=True, max_idle=0)
    here.retry = RETRY
    carry_out(claim, here, StopToken())
    queued = Queued(database, claim)
    key = one(database, "SELECT key FROM artifacts WHERE kind = 'patch'").key
    patch = here.store.get(key)
    (settings.home / "artifacts" / key).unlink()  # for as long as the store is broken
    assert grader.carry_out(queued.grading(), here, StopToken()) == grader.PUT_BACK
    here.store.put(key, patch)
    assert grader.carry_out(queued.grading(), here, StopToken()) == "submitted"
    here.close()
    assert one(database, "SELECT count(*) AS n FROM attempts").n == 1
    assert queued.states == ("finished", "succeeded", "submitted")


def test_tasks_are_marked_whose_grader_has_an_environment_of_its_own(settings: Settings) -> None:
    found = [(task, grader_for(task.goal)) for task in evaluation.demo_tasks(settings, EnvironmentKind.LOCAL)]
    assert {task.graded_apart for task, _ in found} == {True, False}
    assert all(task.graded_apart == made.fresh_environment for task, made in found)


def test_a_failed_grading_waits_before_it_is_tried_again(queued: Queued) -> None:
    slow = type(RETRY)(base_s=60.0, cap_s=60.0)
    assert gradings.put_back(queued.database, queued.taken(), BROKEN, slow)
    assert queued.take() is None
    with queued.database.begin() as connection:
        assert gradings.unpublished(connection, 0.0) == []


def test_a_deadline_ends_what_waits_for_its_grading(queued: Queued) -> None:
    write(queued.database, "UPDATE tasks SET deadline_at = clock_timestamp() - interval '1 s'")
    with queued.database.begin() as connection:
        tasks.expire(connection, RETRY)
    tasks.settle_cancelled(queued.database)
    assert queued.states[1:] == ("cancelled", "expired")
    assert queued.left == 0
