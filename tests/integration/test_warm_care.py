"""A standing process keeps ready what the ledger's queue needs: real PostgreSQL, real environments, real receipts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import Connection, text

from app.environments.base import Origin, Tags
from app.environments.docker import DockerProvider
from app.environments.engine import ROLE, engine_of
from app.environments.listing import listed
from app.environments.oci import OciProvider, Records, available
from app.environments.pool import EnvironmentPool
from app.environments.recorded import Recording
from app.environments.sweeper import Sweeper
from app.environments.warm import Warm, keeper, wire
from app.ledger import accept, host_images, limits, pauses, upcoming
from app.ledger.accept import Accepted, NewRun
from app.ledger.attempts import Claim
from app.ledger.database import Database
from app.ledger.receipt_check import ObjectKind
from app.ledger.receipts import of_run
from app.ledger.upcoming import Upcoming
from app.ledger.waiting import LineKey
from app.models.kinds import PauseKind
from app.models.spec import AgentTask, EnvironmentSpec, Limits, Mode, Reuse, TaskSpec, TestsGoal
from app.settings import Settings
from app.workers import warm_care
from app.workers.host_care import host_name
from tests.building import a_task, claimed, dispatched, ready_instance
from tests.integration import rows
from tests.integration.oci_ground import add_image, left_over
from tests.integration.oci_ground import oci_cache as oci_cache
from tests.integration.oci_ground import oci_programs as oci_programs
from tests.patience import eventually
from tests.services import MakeSettings, missing


@pytest.fixture
def settings(make_settings: MakeSettings, oci_cache: Path) -> Settings:
    found = make_settings(docker_url="unix:///nowhere", warm_environments=3)
    if not (found.home / "cache").exists():
        (found.home / "cache").symlink_to(oci_cache)
    return found


@pytest.fixture
def provider(settings: Settings) -> Iterator[OciProvider]:
    if (why := available(settings)) is not None:
        missing(f"environments without a daemon: {why}")
    made = OciProvider(settings, fetch_bundle=lambda bundle: b"")
    yield made
    made.sweep(installation=settings.installation)
    assert left_over(settings.home) == []


@pytest.fixture
def image(provider: OciProvider, oci_programs: Path) -> EnvironmentSpec:
    return EnvironmentSpec(image=add_image(provider.store, {"sha256:programs": oci_programs}), workdir="/tmp")


def submit(database: Database, settings: Settings, *specs: EnvironmentSpec, graded_apart: bool = False) -> Accepted:
    return accept.accept(
        database, NewRun([TaskSpec(task=task_of(s, graded_apart), agent="nop") for s in specs]), settings
    )


def task_of(spec: EnvironmentSpec, graded_apart: bool = False) -> AgentTask:
    limits = Limits(environment_timeout_s=77.0)
    task = a_task().model_copy(update={"environment": spec, "limits": limits})
    goal = TestsGoal(base_commit="c", test_patch="", test_command="true", fail_to_pass=(), pass_to_pass=())
    return task.model_copy(update={"goal": goal}) if graded_apart else task


@contextmanager
def keeping(settings: Settings, database: Database) -> Iterator[None]:
    """What `host_care` does with it, for the length of the block, on a host with a standing instance."""
    stop = threading.Event()
    host_images.stands_on(database, ready_instance(database), host_name())
    thread = threading.Thread(target=warm_care.Ahead(settings, database, host_name()).keep, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(20)


def ready(settings: Settings) -> list[str]:
    records = Records(settings.home.resolve()).all()
    return [one.id for one in records if "megaflow.ready" in one.labels and one.deadline_unix_s < time.time() + 121]


def tags_of(claim: Claim, settings: Settings) -> Tags:
    return Tags(
        settings.installation,
        claim.instance_id,
        claim.run_id,
        claim.task_id,
        claim.attempt_id,
        claim.deadline_at.timestamp(),
    )


# --- The forecast ---------------------------------------------------------------------------------------------------


def images(database: Database, most: int = 100) -> list[tuple[str | None, int]]:
    return [(one.environment.image, one.position) for one in Upcoming(database).one_by_one(most)]


def test_every_replica_needs_one_of_its_own_in_the_order_of_the_queue(database: Database, settings: Settings) -> None:
    specs = [TaskSpec(task=task_of(EnvironmentSpec(image=name)), agent="nop") for name in "ab"]
    accept.accept(database, NewRun(specs, replicas=3), settings)
    assert sorted(images(database)) == [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("b", 5), ("b", 6)]
    assert len(images(database, 4)) == 4
    (first, *_) = Upcoming(database).one_by_one()
    assert first.timeout_s == 77.0
    pauses.pause(database, PauseKind.USER, _user(database), reason="tests")
    assert images(database) == []


def _user(database: Database) -> str:
    return str(rows.one(database, "SELECT user_name FROM tasks LIMIT 1").user_name)


def test_who_has_its_environment_needs_none_and_who_is_graded_apart_one_more_until_its_agent_has_ended(
    database: Database, settings: Settings
) -> None:
    a, b = EnvironmentSpec(image="a"), EnvironmentSpec(image="b")
    one, apart = submit(database, settings, a), submit(database, settings, b, graded_apart=True)
    submit(database, settings, EnvironmentSpec(image="c"))
    for run in (one, apart):
        dispatched(database, run, Mode.EPHEMERAL)
    assert images(database) == [("a", 0), ("b", 0), ("c", 1)]
    _doors(database, "image_ready")
    assert images(database) == [("c", 1)], "who did not find one ready makes its own"
    _doors(database, "environment_ready")
    assert sorted(images(database)) == [("b", 1), ("c", 1)]
    _doors(database, "agent_ended")
    assert images(database) == [("c", 1)]


def test_what_the_tasks_of_a_run_share_is_needed_once_for_each_run(database: Database, settings: Settings) -> None:
    shared = EnvironmentSpec(image="a", reuse=Reuse.SHARED_READONLY)
    for image in ("a", "b"):
        task = task_of(shared.model_copy(update={"image": image}), graded_apart=True)
        accept.accept(database, NewRun([TaskSpec(task=task, agent="nop")], replicas=3), settings)
    submit(database, settings, shared, graded_apart=True)
    assert sorted(images(database)) == [("a", 1), ("a", 7), ("b", 4)]


def test_no_more_tasks_are_read_than_are_looked_at_however_many_lines_there_are(
    database: Database, settings: Settings
) -> None:
    for user in "abcd":
        specs = [TaskSpec(task=task_of(EnvironmentSpec(image=user)), agent="nop")]
        accept.accept(database, NewRun(specs, user_name=user, replicas=20), settings)
    read: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upcoming.waiting, "heads", _noting(read))
        assert len(images(database, 3)) == 3
        assert len(images(database, 8)) == 8
    assert read == [4, 32]


def _noting(read: list[int]) -> Callable[..., object]:
    real = upcoming.waiting.heads

    def heads(connection: Connection, wanted: list[tuple[LineKey, int]]) -> object:
        found = real(connection, wanted)
        read.append(sum(len(line) for line in found.values()))
        return found

    return heads


def _doors(database: Database, phase: str) -> None:
    with database.begin() as connection:
        connection.execute(
            text("UPDATE attempts SET phases = phases || jsonb_build_object(CAST(:phase AS text), 'now')"),
            {"phase": phase},
        )


# --- Keeping, and the receipt ---------------------------------------------------------------------------------------


def test_what_the_queue_needs_is_ready_and_belongs_to_the_run_from_the_moment_it_is_taken(
    settings: Settings, database: Database, provider: OciProvider, image: EnvironmentSpec
) -> None:
    submit(database, settings, *[image] * 5)
    job = claimed(database)
    recording = Recording(provider, settings, database)
    pool = EnvironmentPool(max_idle=0, warm=Warm(settings.home))
    with keeping(settings, database):
        eventually(lambda: len(ready(settings)) == 3)
        waiting = ready(settings)
        assert rows.one(database, "SELECT count(*) FROM engine_objects") == (0,)
        environment, origin = pool.acquire(
            recording,
            image,
            tags_of(job, settings),
            provider.prepare_image(image, timeout_s=10),
            timeout_s=30,
            allow_reuse=False,
        )
        assert environment.id in waiting
        assert (origin, environment.describe()["path"]) == (Origin.FRESH, "warm")
        assert environment.run("pwd", timeout_s=10).stdout == b"/tmp\n"
        (line,) = of_run(database, job.run_id).objects
        assert (line.engine_id, line.attempt_id, line.instance_id) == (
            environment.id,
            job.attempt_id,
            job.instance_id,
        )
        assert line.destroyed_at is None
        eventually(lambda: len(ready(settings)) == 3)
        assert Sweeper(settings, database).sweep({job.instance_id}).removed == 0
        pool.release(environment, reuse=False)
    (line,) = of_run(database, job.run_id).objects
    assert line.destroyed_by == "worker"
    assert rows.one(database, "SELECT count(*) FROM engine_objects") == (1,), "what nobody took has no line"
    assert list(Records(settings.home.resolve()).all()) == []
    assert not wire.address(settings.home).exists()


def test_what_was_just_accepted_is_made_ahead_before_the_next_look_is_due(
    settings: Settings,
    database: Database,
    provider: OciProvider,
    image: EnvironmentSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper, "_LOOK_S", 3600.0)
    with keeping(settings, database):
        eventually(lambda: wire.address(settings.home).exists())
        time.sleep(0.5)  # it has looked, and listens
        submit(database, settings, image)
        eventually(lambda: len(ready(settings)) == 1)


def test_what_is_made_ahead_leaves_the_places_to_those_who_wait(
    settings: Settings, database: Database, provider: OciProvider, image: EnvironmentSpec
) -> None:
    limit = f"environment_starts:{socket.gethostname()}"
    limits.set_limit(database, limit, 0)
    submit(database, settings, image)
    with keeping(settings, database):
        time.sleep(1.0)
        assert ready(settings) == []
        limits.clear_limit(database, limit)
        eventually(lambda: len(ready(settings)) == 1)


def test_a_taken_one_that_is_swept_is_on_its_takers_receipt(
    settings: Settings, database: Database, provider: OciProvider, image: EnvironmentSpec
) -> None:
    job = claimed(database)
    made = provider.create(
        image, Tags.ahead(settings.installation, ready_instance(database), time.time() + 60), timeout_s=30
    )
    taken = provider.take_over(image, made.hand_over(), tags_of(job, settings))
    assert Sweeper(settings, database).sweep(set(), ended=[job.instance_id]).removed == 1
    (line,) = of_run(database, job.run_id).objects
    assert (line.engine_id, line.destroyed_by) == (taken.id, "sweeper")
    taken.destroy()


# --- Containers of an engine, whose labels stay those of the keeper ---------------------------------------------------


@pytest.fixture
def engines(make_settings: MakeSettings, docker_engine: str) -> Iterator[Settings]:
    found = make_settings(container_runtime="docker", warm_environments=1)
    yield found
    DockerProvider(found, fetch_bundle=lambda bundle: b"").sweep(installation=found.installation)


@pytest.mark.docker
def test_a_container_that_was_made_ahead_is_swept_as_its_takers(engines: Settings, base_image_tag: str) -> None:
    database = Database(engines.database())
    provider = DockerProvider(engines, fetch_bundle=lambda bundle: b"")
    spec = EnvironmentSpec(image=base_image_tag)
    job, sweeper = claimed(database), Sweeper(engines, database)
    waiting, made = (
        provider.create(
            spec, Tags.ahead(engines.installation, ready_instance(database), time.time() + 60), timeout_s=60
        )
        for _ in range(2)
    )
    time.sleep(3.5)  # no more young
    assert sweeper.sweep(set()).removed == 0, "nobody's: its deadline has not passed"
    taken = provider.take_over(spec, made.hand_over(), tags_of(job, engines))
    assert sweeper.sweep(set()).removed == 0, (
        "the ledger knows of an instance that is newer than the list of the living"
    )

    def owners() -> dict[str, UUID | None]:
        things, _ = listed(engines)
        return {thing.id: thing.attempt_id for thing in things if thing.kind is ObjectKind.CONTAINER}

    eventually(lambda: owners() == {waiting.id: None, taken.id: job.attempt_id})  # a moment after it was taken
    with database.begin() as connection:
        connection.execute(
            text("UPDATE instances SET state = 'failed', ended_at = now() WHERE id = :id"), {"id": job.instance_id}
        )
    assert sweeper.sweep(set()).removed == 1
    (line,) = of_run(database, job.run_id).objects
    assert (line.engine_id, line.destroyed_by) == (taken.id, "sweeper")
    waiting.keep_until(time.time() - 1)
    assert sweeper.sweep(set()).removed == 1
    taken.destroy()
    waiting.destroy()
    database.close()


@pytest.mark.docker
def test_a_container_is_kept_ready_and_handed_out(engines: Settings, base_image_tag: str) -> None:
    database = Database(engines.database())
    spec = EnvironmentSpec(image=base_image_tag)
    submit(database, engines, spec)
    job = claimed(database)
    engine, provider = engine_of(engines), DockerProvider(engines, fetch_bundle=lambda bundle: b"")
    labels = {"label": [f"megaflow={engines.installation}", f"{ROLE}=environment"]}
    pool = EnvironmentPool(max_idle=0, warm=Warm(engines.home))
    with keeping(engines, database):
        eventually(lambda: any("-ready-" in one["Names"][0] for one in engine.api.containers(filters=labels)))
        image_id, tags = provider.prepare_image(spec, timeout_s=10), tags_of(job, engines)
        found: list[str] = []

        def warm() -> bool:
            environment, _ = pool.acquire(
                Recording(provider, engines, database), spec, tags, image_id, timeout_s=60, allow_reuse=False
            )
            found.append(environment.id)
            assert environment.run("true", timeout_s=10).ok
            path = environment.describe()["path"]
            pool.release(environment, reuse=False)
            return bool(path == "warm")

        eventually(warm)
    assert {line.engine_id for line in of_run(database, job.run_id).objects} == set(found)
    assert engine.api.containers(all=True, filters=labels) == []
    database.close()
