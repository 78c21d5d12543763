"""The forecast of what the queue needs, and who pulls it ahead: real PostgreSQL, real engine."""

from __future__ import annotations

import time
import uuid

import pytest
from sqlalchemy import event

from app.artifacts import open_store
from app.artifacts.bundles import store_bundle
from app.host.engine import engine_of
from app.images.task_images import Images, host_of
from app.ledger import accept, limits, quotas
from app.ledger.accept import NewRun
from app.ledger.database import Database
from app.ledger.upcoming import Upcoming
from app.models.spec import Build, EnvironmentSpec, Mode, TaskSpec
from app.scheduling.dispatcher import Dispatcher
from app.settings import Settings
from app.workers.host_care import prefetcher
from app.workers.semaphores import LedgerSemaphore
from tests.building import a_task


def spec(environment: EnvironmentSpec, name: str = "example-1") -> TaskSpec:
    task = a_task(name).model_copy(update={"environment": environment})
    return TaskSpec(task=task, agent="nop", mode=Mode.EPHEMERAL)


def submit(
    database: Database, settings: Settings, *images: str, user: str = "alice", priority: int = 0, replicas: int = 1
) -> accept.Accepted:
    new = NewRun([spec(EnvironmentSpec(image=i)) for i in images], user_name=user, priority=priority, replicas=replicas)
    return accept.accept(database, new, settings)


def order(database: Database, *, fair: bool = True) -> list[str | None]:
    return [one.image for one in Upcoming(database, fair=fair).needs()]


def test_each_image_comes_once_in_the_order_of_the_queue(database: Database, settings: Settings) -> None:
    submit(database, settings, "a", "b", "a", replicas=3)
    submit(database, settings, "urgent", priority=5)
    assert order(database) == ["urgent", "a", "b"]


def test_only_the_head_of_a_long_queue_is_read_and_specs_only_once(database: Database, settings: Settings) -> None:
    submit(database, settings, *(f"i{n:03}" for n in range(120)))
    upcoming = Upcoming(database)
    asked: list[str] = []
    event.listen(database.engine, "before_cursor_execute", lambda *a: asked.append(a[2]))
    assert [one.image for one in upcoming.needs(50)] == [f"i{n:03}" for n in range(50)]
    assert sum("FROM specs" in statement for statement in asked) == 1
    upcoming.needs(50)
    assert sum("FROM specs" in statement for statement in asked) == 1


def test_the_forecast_is_what_the_dispatcher_then_does(database: Database, settings: Settings) -> None:
    for user, images in {"alice": "abcd", "bob": "efg", "carol": "hi"}.items():
        submit(database, settings, *images, user=user, priority=1 if user == "carol" else 0)
    quotas.set_quota(database, "bob", weight=2.0)
    forecast = order(database)
    one_by_one = settings.model_copy(update={"ephemeral_capacity": 100, "dispatch_batch": 1})
    dispatcher = Dispatcher(database, one_by_one, lambda _, requests: {}, lambda items: None)
    while dispatcher.pass_once():
        pass
    found = database.sql(
        "SELECT CAST(s.body AS json) -> 'task' -> 'environment' ->> 'image' FROM attempts a"
        " JOIN tasks t ON t.id = a.task_id JOIN specs s ON s.digest = t.spec_digest ORDER BY a.dispatched_at"
    )
    assert found.scalars().all() == forecast


def test_a_place_is_one_of_the_fleets_and_lives_on_for_as_long_as_it_is_held(database: Database) -> None:
    one, two = LedgerSemaphore(database, lease_s=0.6), LedgerSemaphore(database, lease_s=0.6)
    with one.hold("image_pulls:r", 1, timeout_s=5):
        time.sleep(1.5)  # more than two leases
        with pytest.raises(TimeoutError, match="image_pulls:r"), two.hold("image_pulls:r", 1, timeout_s=0):
            pass
    with two.hold("image_pulls:r", 1, timeout_s=0):
        pass


@pytest.mark.docker
def test_what_the_queue_needs_is_built_before_its_task_runs_unless_the_host_has_no_place(
    settings: Settings, database: Database, docker_engine: str
) -> None:
    folder = settings.home / "context"
    folder.mkdir()
    (folder / "Dockerfile").write_text("FROM scratch\nCOPY nonce /nonce\n")
    (folder / "nonce").write_text(uuid.uuid4().hex)
    context = store_bundle(open_store(settings.artifacts(), endpoint_url=None), folder)
    environment = EnvironmentSpec(build=Build(context=context))
    accept.accept(database, NewRun([spec(environment)]), settings)
    engine = engine_of(settings)
    ahead, images = prefetcher(settings, database), Images(settings, fetch_bundle=lambda _: b"")
    limits.set_limit(database, f"image_builds:{host_of(engine)}", 0)
    assert not ahead.look()
    assert images.here(environment) is None
    limits.clear_limit(database, f"image_builds:{host_of(engine)}")
    assert ahead.look()
    found = images.here(environment)
    assert found is not None
    engine.api.remove_image(found, force=True)
