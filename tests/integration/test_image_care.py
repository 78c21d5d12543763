"""Whoever pulls ahead stands in the fleet's lines like an attempt does: real PostgreSQL, real engine."""

from __future__ import annotations

import threading
import time
import uuid

import pytest

from app.artifacts import open_store
from app.artifacts.bundles import store_bundle
from app.host.engine import engine_of
from app.images.task_images import Images, host_of
from app.ledger import accept, limits
from app.ledger.accept import NewRun
from app.ledger.database import Database
from app.models.spec import Build, EnvironmentSpec, Mode, TaskSpec
from app.settings import Settings
from app.workers.host_care import prefetcher
from app.workers.semaphores import LedgerSemaphore
from tests.building import a_task


def test_a_place_is_one_of_the_fleets_and_lives_on_for_as_long_as_it_is_held(database: Database) -> None:
    one, two = LedgerSemaphore(database, lease_s=0.6), LedgerSemaphore(database, lease_s=0.6)
    with one.hold("image_pulls:r", 1, timeout_s=5):
        time.sleep(1.5)  # more than two leases
        with pytest.raises(TimeoutError, match="image_pulls:r"), two.hold("image_pulls:r", 1, timeout_s=0):
            pass
    with two.hold("image_pulls:r", 1, timeout_s=0):
        pass


def test_a_wait_ends_when_the_place_is_given_back(database: Database) -> None:
    entered = threading.Event()

    def other() -> None:
        with LedgerSemaphore(database, lease_s=5).hold("image_pulls:r", 1, timeout_s=5):
            entered.set()
            time.sleep(0.5)

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(5)
    with LedgerSemaphore(database, lease_s=5).hold("image_pulls:r", 1, timeout_s=5):
        thread.join(5)


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
    task = a_task().model_copy(update={"environment": environment})
    accept.accept(database, NewRun([TaskSpec(task=task, agent="nop", mode=Mode.EPHEMERAL)]), settings)
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
