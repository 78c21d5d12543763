"""Receipts: every container, folder and volume has its line, whoever made or removed it, and the engine agrees."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from app import evaluation
from app.datasets.selection import Selection
from app.environments import listing
from app.environments.contract import Environment, Tags
from app.environments.pool import EnvironmentPool
from app.environments.receipts import EnvironmentRecorder
from app.environments.runtimes.docker.provider import DockerProvider
from app.environments.runtimes.local.environment import LocalProvider
from app.environments.sweeper import Sweeper
from app.evaluation import Submission
from app.host.engine import Engine, engine_of
from app.ledger import attempts, receipt_check, receipts
from app.ledger.attempts import Claim
from app.ledger.database import Database
from app.ledger.receipt_check import Inventory, ListedResource, compare
from app.ledger.receipts import NewResource, ObjectKind, ObjectLine, Owner, Remover, of_run
from app.models.endings import EndReason
from app.models.spec import Build, Bundle, EnvironmentKind, EnvironmentSpec, Mode
from app.settings import Settings
from app.workers import services
from app.workers.attempt import carry_out
from app.workers.lease import StopToken
from megaflow.contract.environments.fixture import sweep_all, tar_of
from tests.building import new_id
from tests.integration.command import CommandLine
from tests.integration.rows import a_run, a_task, ago, an_attempt, an_instance, facts, force, insert, one, write
from tests.recorded import Recording


@dataclass
class Job:
    """A run of one task whose attempt runs, on an instance of its own."""

    run_id: UUID
    task_id: UUID
    attempt_id: UUID
    instance_id: UUID
    database: Database

    @property
    def owner(self) -> Owner:
        return Owner(self.run_id, self.task_id, self.attempt_id, self.instance_id)

    def tags(self, settings: Settings, deadline_s: float = 600.0) -> Tags:
        return Tags(settings.installation, self.instance_id, *self.owner[:3], time.time() + deadline_s)

    def set(self, statement: str, **values: Any) -> None:
        force(self.database, statement, **self.owner._asdict(), **values)

    @property
    def line(self) -> ObjectLine:
        (line,) = of_run(self.database, self.run_id).objects
        return line

    @property
    def removers(self) -> dict[str, str | None]:
        return {line.engine_id: line.destroyed_by for line in of_run(self.database, self.run_id).objects}

    def made(self, identity: str, kind: ObjectKind = ObjectKind.CONTAINER) -> None:
        with self.database.begin() as connection:
            receipts.created(connection, [NewResource(kind, identity, self.owner)])

    def gone(self, identity: str, by: Remover = Remover.WORKER, **values: Any) -> None:
        with self.database.begin() as connection:
            receipts.destroyed(connection, [NewResource(ObjectKind.CONTAINER, identity, self.owner, **values)], by)

    def grow_old(self) -> None:
        self.set("UPDATE created_resources SET created_at = created_at - interval '1 min'")

    def end_attempt(self, seconds_ago: float = 1.0, **phases: str) -> None:
        at = datetime.now(UTC) - timedelta(seconds=seconds_ago)
        ended = "state = 'finished', finished_at = :at, phases = CAST(:phases AS jsonb)"
        self.set(f"UPDATE attempts SET {ended} WHERE id = :attempt_id", at=at, phases=json.dumps(phases))
        self.set("UPDATE tasks SET state = 'succeeded', finished_at = :at WHERE id = :task_id", at=at)

    def end_instance(self, *, swept: bool = False, seconds_ago: float = 1.0) -> None:
        at = datetime.now(UTC) - timedelta(seconds=seconds_ago)
        ended = "state = 'terminated', ended_at = :at, exit_code = 0, swept_at = :swept"
        self.set(f"UPDATE instances SET {ended} WHERE id = :instance_id", at=at, swept=at if swept else None)


def a_job(database: Database, mode: str = "ephemeral", **instance: Any) -> Job:
    values = {"state": "busy" if mode == "ephemeral" else "ready", "handle": "1", "ready_at": ago(5), **instance}
    instance_id = an_instance(database, mode=mode, **values)
    run_id = a_run(database)
    task_id = a_task(database, run_id, mode=mode, state="running", attempts=1)
    attempt_id = an_attempt(database, task_id, mode=mode, state="running", instance_id=instance_id)
    if mode == "ephemeral":
        write(database, "UPDATE instances SET attempt_id = :a WHERE id = :i", a=attempt_id, i=instance_id)
    return Job(run_id, task_id, attempt_id, instance_id, database)


def kinds(database: Database) -> list[tuple[str, str, str | None]]:
    ours = [fact for fact in facts(database) if fact[0].startswith("environment.")]
    return [(kind, data["engine_id"], data.get("by")) for kind, data in ours]


def recipe(_: Bundle) -> bytes:
    return tar_of({"setup.sh": b"true\n"})


@pytest.fixture
def local(settings: Settings, database: Database) -> Recording:
    """A provider of folders, each from a recipe that does nothing."""
    return Recording(LocalProvider(settings, fetch_bundle=recipe), settings, database)


FOLDER = EnvironmentSpec(kind=EnvironmentKind.LOCAL, build=Build(context=Bundle(sha256="1" * 64, size_bytes=1)))


def test_a_folder_has_its_line_from_its_making_to_its_end(
    local: Recording, database: Database, settings: Settings
) -> None:
    job = a_job(database)
    environment = local.create(FOLDER, job.tags(settings), timeout_s=30)
    (line,) = of_run(database, job.run_id).objects
    assert (line.engine_id, line.kind, line.why) == (environment.id, "folder", "its attempt runs")
    assert environment.run("echo x", timeout_s=10).stdout == b"x\n"
    for _ in range(2):
        environment.destroy()
    assert (job.line.why, job.line.destroyed_by) == (None, "worker")
    assert [kind for kind, _, _ in kinds(database)] == ["environment.created", "environment.destroyed"]
    ((_, data), _) = facts(database)
    assert data == {"engine_id": environment.id, "kind": "folder"}
    assert one(database, "SELECT run_id, attempt_id FROM events LIMIT 1") == (job.run_id, job.attempt_id)


def test_a_ledger_that_is_away_does_not_cost_the_environment_and_the_end_makes_up_for_it(
    settings: Settings, database: Database
) -> None:
    job = a_job(database)
    away = Database("postgresql://nobody@/nothing?host=/nowhere")
    recording = Recording(LocalProvider(settings, fetch_bundle=recipe), settings, away)
    environment = recording.create(FOLDER, job.tags(settings), timeout_s=30)
    assert of_run(database, job.run_id).objects == ()
    environment.receipt._database = database
    environment.destroy()
    assert job.line.destroyed_by == "worker"
    away.close()


def test_the_sweeper_records_what_it_removed_even_what_was_never_recorded(
    database: Database, settings: Settings
) -> None:
    job = a_job(database)
    provider = LocalProvider(settings, fetch_bundle=recipe)
    known, unknown = (provider.create(FOLDER, job.tags(settings, -1.0), timeout_s=30) for _ in range(2))
    job.made(known.id, ObjectKind.FOLDER)
    assert Sweeper(settings, database).sweep({job.instance_id}).removed == 2
    assert job.removers == {known.id: "sweeper", unknown.id: "sweeper"}


def test_what_is_gone_without_a_word_is_recorded_as_gone(
    local: Recording, database: Database, settings: Settings
) -> None:
    job = a_job(database)
    kept = local.create(FOLDER, job.tags(settings), timeout_s=30)
    lost = local.create(FOLDER, job.tags(settings), timeout_s=30)
    lost._destroy()  # as if it had crashed
    sweeper = Sweeper(settings, database)
    sweeper.sweep({job.instance_id})
    assert [line.why for line in of_run(database, job.run_id).objects] == ["its attempt runs"] * 2, "too young to tell"
    job.grow_old()
    sweeper.sweep({job.instance_id})
    assert job.removers == {kept.id: None, lost.id: "unknown"}
    kept.destroy()


@pytest.mark.parametrize(
    ("mode", "attempt", "instance", "why", "accounted"),
    [
        ("ephemeral", None, None, "its attempt runs", True),
        ("persistent", {"torn_down": "x"}, None, "kept idle in the pool", True),
        ("ephemeral", {}, {}, "a sweep is due", True),
        ("ephemeral", {}, {"swept": True}, "left behind: its instance has ended", False),
        ("ephemeral", {"seconds_ago": 600}, None, "left behind: its attempt has ended", False),
    ],
)
def test_what_stands_has_a_reason(
    database: Database,
    mode: str,
    attempt: dict[str, Any] | None,
    instance: dict[str, Any] | None,
    why: str,
    accounted: bool,
) -> None:
    job = a_job(database, mode)
    job.made("c1")
    if attempt is not None:
        job.end_attempt(**attempt)
    if instance is not None:
        job.end_instance(**instance)
    said = of_run(database, job.run_id)
    (line,) = said.objects
    assert why in str(line.why)
    assert line.accounted is accounted
    assert said.counts["container"] == {"made": 1, "gone": 0, "standing": 1}


def _receipts(database: Database) -> list[dict[str, Any]]:
    return [data for kind, data in facts(database) if kind == "run.receipt"]


def test_a_run_gets_one_receipt_when_its_last_thing_is_gone(database: Database) -> None:
    job = a_job(database)
    job.made("c1")
    assert receipts.issue(database) == []
    job.end_attempt(torn_down="x")
    assert receipts.issue(database) == [], "its instance has not left"
    job.end_instance()
    assert receipts.issue(database) == [], "it was not swept"
    job.gone("c1")
    job.end_instance(swept=True)
    with ThreadPoolExecutor(4) as threads:
        issued = [run for runs in threads.map(lambda _: receipts.issue(database), range(8)) for run in runs]
    assert issued == [job.run_id]
    (data,) = _receipts(database)
    counts = {"tasks": 1, "attempts": 1, "instances": 1, "instances_standing": 0}
    assert data == counts | {"made": {"container": 1}, "gone": {"container": 1}, "standing": []}


def test_a_receipt_comes_at_last_even_when_something_never_goes(database: Database) -> None:
    job = a_job(database)
    job.made("c1")
    job.end_attempt(seconds_ago=600)
    assert receipts.issue(database) == [job.run_id]
    assert _receipts(database)[0]["standing"] == ["c1"]


def _thing(job: Job, identity: str, **values: Any) -> ListedResource:
    whose = (job.run_id, job.attempt_id, job.instance_id)
    return replace(ListedResource(ObjectKind.CONTAINER, identity, "name", "environment", *whose, 60.0), **values)


def _alive(*ids: UUID) -> dict[str, frozenset[UUID]]:
    return {"process": frozenset(ids)}


def test_a_world_that_is_as_a_receipt_says_agrees_and_what_is_missing_is_told(database: Database) -> None:
    job = a_job(database)
    job.made("c1")
    said = of_run(database, job.run_id)
    others = (
        _thing(job, "c2", age_s=1.0),
        _thing(job, "c3", run_id=new_id()),
        _thing(job, "n1", kind=ObjectKind.NETWORK, run_id=None),
    )
    assert compare(said, Inventory((_thing(job, "c1"), *others), _alive(job.instance_id))) == []
    found = compare(said, Inventory((), _alive()))
    assert [(one.kind, one.left_behind) for one in found] == [("container", False), ("instance", False)]
    assert compare(said, Inventory((), {}, silent=("engine", "process"))) == [], "nobody was asked"


@pytest.mark.parametrize(
    ("thing", "alive", "what"),
    [
        ({"identity": "c1"}, False, "removed by the worker, and still there"),
        ({"identity": "c2"}, False, "never recorded"),
        ({"identity": "i1", "run_id": None, "role": "instance"}, False, "container of an instance that has ended"),
        (None, True, "process still has it"),
    ],
)
def test_what_is_left_behind_is_found(database: Database, thing: dict[str, Any] | None, alive: bool, what: str) -> None:
    job = a_job(database)
    job.gone("c1")
    job.end_attempt()
    job.end_instance(swept=True)
    said = of_run(database, job.run_id)
    assert compare(said, Inventory((), _alive())) == []
    things = () if thing is None else (_thing(job, **thing),)
    (found,) = compare(said, Inventory(things, _alive(*([job.instance_id] if alive else []))))
    assert what in found.what
    assert found.left_behind


def _claim(database: Database, job: Job, settings: Settings) -> Claim:
    kind, mode = EnvironmentKind.LOCAL, Mode.EPHEMERAL
    submission = Submission(
        dataset="demo", agent="oracle", environment=kind, mode=mode, selection=Selection(only=("order-ledger",))
    )
    (spec,) = evaluation.specs_of(submission, settings)
    soon = datetime.now(UTC) + timedelta(minutes=5)
    insert(database, "leases", attempt_id=job.attempt_id, instance_id=job.instance_id, expires_at=soon)
    return Claim(job.attempt_id, 1, job.task_id, job.run_id, job.instance_id, mode, soon, spec)


def test_an_attempt_leaves_a_receipt_that_agrees_with_this_host(database: Database, settings: Settings) -> None:
    job = a_job(database)
    here = services.build(settings, pooled=True, max_idle=0)
    assert carry_out(_claim(database, job, settings), here, StopToken()) is EndReason.SUBMITTED
    here.close()
    said = of_run(database, job.run_id)
    (line,) = said.objects
    assert (line.kind, line.destroyed_by, line.attempt_id) == ("folder", "worker", job.attempt_id)
    things, _ = listing.listed(settings)
    assert compare(said, Inventory(tuple(things), _alive(job.instance_id))) == []
    order = [kind for kind, _ in facts(database) if kind in ("environment.created", "environment.destroyed")]
    assert order == ["environment.created", "environment.destroyed"]


@pytest.fixture
def engine(settings: Settings, docker_engine: str, base_image_tag: str) -> Iterator[Engine]:
    yield engine_of(settings)
    sweep_all(settings)


@pytest.fixture
def containers(settings: Settings, database: Database, engine: Engine) -> Recording:
    return Recording(DockerProvider(settings, fetch_bundle=lambda bundle: b""), settings, database)


@pytest.mark.docker
def test_a_container_a_crash_and_the_sweeper_agree_with_the_engine(
    containers: Recording, database: Database, settings: Settings, base_image_tag: str
) -> None:
    job = a_job(database)
    spec = EnvironmentSpec(image=base_image_tag)
    environment = containers.create(spec, job.tags(settings), timeout_s=60)

    def differences() -> list[str]:
        things, engine_answered = listing.listed(settings)
        assert engine_answered
        world = Inventory(tuple(replace(thing, age_s=60.0) for thing in things), _alive(job.instance_id))
        return [found.id for found in compare(of_run(database, job.run_id), world)]

    assert differences() == []
    crashed = containers.provider.create(spec, job.tags(settings), timeout_s=60)  # its line was never written
    assert differences() == [crashed.id]
    environment.destroy()
    time.sleep(3.1)  # younger ones are left alone
    assert Sweeper(settings, database).sweep(set()).removed == 1
    crashed.destroy()
    job.set("UPDATE instances SET swept_at = now() WHERE id = :instance_id")
    assert job.removers == {environment.id: "worker", crashed.id: "sweeper"}
    assert differences() == []


def test_the_command_compares_and_says_so(
    local: Recording, database: Database, settings: Settings, megaflow: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = a_job(database, provider="gone-by")
    environment = local.create(FOLDER, job.tags(settings), timeout_s=30)
    environment.destroy()
    job.end_attempt()
    job.end_instance(swept=True)
    assert "agrees" in megaflow("receipt", job.run_id)
    stray = local.provider.create(FOLDER, job.tags(settings), timeout_s=30)
    monkeypatch.setattr(receipt_check, "_YOUNG_S", -1.0)
    said = megaflow.run("receipt", job.run_id)
    assert said.exit_code == 1
    assert f"LEFT BEHIND: folder {stray.id}: never recorded" in said.output
    found = megaflow.json("receipt", job.run_id)
    assert [one["id"] for one in found["differences"]] == [stray.id]
    assert found["agrees"] is False
    assert [line["engine_id"] for line in found["receipt"]["objects"]] == [environment.id]
    stray.destroy()


def test_a_line_is_written_once_and_ended_once(database: Database) -> None:
    job = a_job(database)
    for _ in range(2):
        job.made("c1")
    for by in (Remover.WORKER, Remover.SWEEPER):
        job.gone("c1", by)
    with database.begin() as connection:
        receipts.vanished(connection, ["c1"])
    line = job.line
    assert line.destroyed_by == "worker"
    assert line.destroyed_at is not None
    assert line.created_at <= line.destroyed_at
    assert kinds(database) == [("environment.created", "c1", None), ("environment.destroyed", "c1", "worker")]


def test_a_receipt_does_not_wait_for_what_a_pool_keeps_but_for_the_teardown(database: Database) -> None:
    job = a_job(database, "persistent")
    job.made("c1")
    job.end_attempt()
    assert receipts.issue(database) == []
    job.end_attempt(torn_down="x")
    assert receipts.issue(database) == [job.run_id]
    (data,) = _receipts(database)
    assert (data["standing"], data["instances_standing"]) == (["c1"], 1)


def test_a_task_that_is_stopped_has_the_end_of_its_environment_on_record(
    database: Database, settings: Settings
) -> None:
    job = a_job(database)
    here = services.build(settings, pooled=True, max_idle=0)
    token = StopToken()

    def stop_at_the_phase(connection_database: Database, *values: Any, **named: Any) -> None:
        if "environment_ready" in str(values):
            token.stop(EndReason.CANCELLED)
        original(connection_database, *values, **named)

    original = attempts.record_phase
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attempts, "record_phase", stop_at_the_phase)
        assert carry_out(_claim(database, job, settings), here, token) is EndReason.CANCELLED
    here.close()
    assert job.line.destroyed_by == "worker"


@pytest.mark.docker
def test_a_recycled_container_keeps_its_line_until_the_pool_lets_it_go(
    containers: Recording, database: Database, settings: Settings, base_image_tag: str
) -> None:
    job, other = a_job(database, "persistent"), a_job(database, "persistent")
    spec = EnvironmentSpec(image=base_image_tag)
    image = containers.provider.prepare_image(spec, timeout_s=30)
    pool = EnvironmentPool(max_idle=1, create=EnvironmentRecorder(settings, database).create)

    def used_by(who: Job) -> Environment:
        tags = who.tags(settings)
        environment, _ = pool.acquire(containers.provider, spec, tags, image, timeout_s=60, allow_reuse=True)
        pool.release(environment, reuse=True)
        return environment

    first = used_by(job)
    job.end_attempt(torn_down="x")
    assert "kept idle in the pool" in str(job.line.why)
    assert used_by(other).id == first.id
    assert of_run(database, other.run_id).objects == ()
    pool.close()
    assert job.line.destroyed_by == "worker"
