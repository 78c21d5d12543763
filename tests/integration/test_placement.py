"""Tasks go to the host that has their image, and to any other when it does not take them: real PostgreSQL, real Redis,
real workers on hosts of different names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from uuid import UUID

import pytest
from celery import Celery

from app.host.engine import engine_of
from app.images.layer_store import ImageStore, StoredImage
from app.images.metadata import ImageChanges, ImageMetadata
from app.images.prefetch import Prefetcher
from app.images.references import key_of
from app.ledger import accept, attempts, host_images
from app.ledger.accept import Accepted, NewRun
from app.ledger.admission import QueuedMessage
from app.ledger.database import Database
from app.models.instance import InstanceRequest
from app.models.spec import AgentTask, Bundle, Compose, EnvironmentSpec, Mode, TaskSpec
from app.scheduling.dispatcher import Dispatcher
from app.scheduling.placement import home_of
from app.settings import PREFIX, Settings
from app.tasks.attempt import publish
from app.workers import host_care
from app.workers.host_care import Reporter, left_to_others
from tests.building import a_task, ready_instance
from tests.integration.rows import every, one
from tests.services import MakeSettings, missing
from tests.waiting import eventually

SOON_S = 60.0
"""More than anything here takes, on a busy machine."""


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings(persistent_instances=0, republish_s=0.2, docker_url="unix:///nowhere.sock", image_prefetch=0)


@pytest.fixture
def sent() -> list[QueuedMessage]:
    return []


@pytest.fixture
def dispatcher(database: Database, settings: Settings, sent: list[QueuedMessage]) -> Dispatcher:
    return Dispatcher(database, settings, _nothing, sent.extend, key_of)


def _nothing(_provider: str, _requests: Sequence[InstanceRequest]) -> dict[UUID, str]:
    return {}


def standing(database: Database, host: str) -> UUID:
    """A ready instance of four slots there."""
    instance_id = ready_instance(database)
    host_images.stands_on(database, instance_id, host)
    return instance_id


def needing(image: str, mode: Mode = Mode.PERSISTENT) -> TaskSpec:
    made: AgentTask = a_task(f"needs-{image}", max_attempts=1)
    return TaskSpec(task=made.model_copy(update={"environment": EnvironmentSpec(image=image)}), agent="nop", mode=mode)


def submit(database: Database, *images: str, user: str = "default", mode: Mode = Mode.PERSISTENT) -> Accepted:
    return accept.accept(database, NewRun(specs=[needing(image, mode) for image in images], user_name=user))


def hosts_of(sent: Sequence[QueuedMessage], database: Database) -> dict[str, str | None]:
    """Where messages went, by the image of their task."""
    statement = (
        "SELECT a.id, CAST(s.body AS json) -> 'task' -> 'environment' ->> 'image' AS image FROM attempts a"
        " JOIN tasks t ON t.id = a.task_id JOIN specs s ON s.digest = t.spec_digest"
    )
    images = {row.id: row.image for row in every(database, statement)}
    return {images[item.message.attempt_id]: item.host for item in sent}


def test_a_message_goes_to_the_host_that_has_the_image(
    dispatcher: Dispatcher, database: Database, sent: list[QueuedMessage]
) -> None:
    for host, images in {"alpha": ["a1", "a2"], "beta": ["b1", "b2", "b3"]}.items():
        standing(database, host)
        host_images.report(database, host, images)
    submit(database, "b1", "a1", "b2", "a2", "b3")
    dispatcher.pass_once()
    assert hosts_of(sent, database) == {"b1": "beta", "a1": "alpha", "b2": "beta", "a2": "alpha", "b3": "beta"}


def test_a_host_that_was_sent_a_task_is_taken_to_pull_its_image(
    dispatcher: Dispatcher, database: Database, sent: list[QueuedMessage]
) -> None:
    for host in ("alpha", "beta"):
        standing(database, host)
    submit(database, "x")
    dispatcher.pass_once()
    (first,) = sent
    assert first.host == home_of("x", ["alpha", "beta"])
    submit(database, "x")
    dispatcher.pass_once()
    assert sent[-1].host == first.host


def test_ephemeral_tasks_are_for_no_host_and_those_that_take_the_pool_are(
    dispatcher: Dispatcher, database: Database, sent: list[QueuedMessage]
) -> None:
    for host in ("alpha", "beta"):
        standing(database, host)
    submit(database, "e", mode=Mode.EPHEMERAL)
    submit(database, "p", mode=Mode.AUTO)
    dispatcher.pass_once()
    where = hosts_of(sent, database)
    assert where["e"] is None
    assert where["p"] == home_of("p", ["alpha", "beta"])


def test_a_message_that_its_host_does_not_claim_goes_to_all_after_a_moment(
    dispatcher: Dispatcher, database: Database, sent: list[QueuedMessage]
) -> None:
    standing(database, "alpha")
    other = standing(database, "beta")
    host_images.report(database, "alpha", ["a"])
    submit(database, "a")
    dispatcher.pass_once()
    assert [item.host for item in sent] == ["alpha"]
    assert attempts.claim_any(database, other, lease_s=9) is None, "for a moment it is left to its host"
    time.sleep(0.25)
    dispatcher.pass_once()
    assert [item.host for item in sent] == ["alpha", None]
    assert attempts.claim_any(database, other, lease_s=9) is not None


def test_a_project_goes_to_the_host_that_has_all_its_images_and_else_to_whoever_takes_it(
    dispatcher: Dispatcher, database: Database, sent: list[QueuedMessage]
) -> None:
    known, unknown = (
        EnvironmentSpec(compose=Compose(context=Bundle(sha256=digit * 64, size_bytes=1))) for digit in "ab"
    )
    for host, images in {"alpha": [], "beta": [key_of(known)], "gamma": []}.items():
        standing(database, host)
        host_images.report(database, host, images)
    queue = [key_of(known), key_of(unknown)]
    assert left_to_others(database, "alpha", queue) == {key_of(known)}
    assert left_to_others(database, "beta", queue) == set()
    task = a_task().model_copy(update={"environment": known})
    accept.accept(database, NewRun([TaskSpec(task=task, agent="nop", mode=Mode.PERSISTENT)]))
    dispatcher.pass_once()
    assert [item.host for item in sent] == ["beta"]


def test_a_host_says_what_lies_unpacked_on_it_and_says_so_when_it_is_gone(
    settings: Settings, database: Database
) -> None:
    reporter, store = Reporter(settings, database, "alpha"), ImageStore(settings.home)
    have(settings.home, "some/image:1")
    reporter.look()
    with database.begin() as connection:
        assert host_images.where(connection, ["some/image:1", "x"]) == {"some/image:1": {"alpha"}}
    store.remove(IMAGE_ID, keep=set)
    reporter.look()
    with database.begin() as connection:
        assert host_images.where(connection, ["some/image:1"]) == {}


@pytest.mark.docker
def test_a_host_says_what_its_engine_has_by_its_names_and_by_those_of_tasks(
    make_settings: MakeSettings, base_image_tag: str
) -> None:
    settings = make_settings()
    book, image_id = ImageMetadata(settings), engine_of(settings).api.inspect_image(base_image_tag)["Id"]
    presence = ImageChanges(settings)
    assert base_image_tag in presence.here()
    book.made(image_id, "build:here", ["some/name:1"])
    book.made("sha256:" + "2" * 64, "build:gone", ["some/name:2"])
    assert {"build:here", "build:gone"} & presence.here() == {"build:here"}
    book.forget(image_id)
    assert "build:here" not in presence.here()


@pytest.mark.docker
def test_what_is_left_to_others_is_neither_fetched_here_nor_kept_for_the_queue(
    make_settings: MakeSettings, base_image_tag: str
) -> None:
    settings = make_settings(image_prefetch=5)
    theirs, here = EnvironmentSpec(image="localhost:1/theirs:1"), EnvironmentSpec(image=base_image_tag)
    ahead = Prefetcher(settings, queue=lambda _far: [theirs, here], fetch_bundle=lambda _: b"")
    assert ahead.look(), "alone, it tries to fetch what is missing"
    ahead = Prefetcher(settings, queue=lambda _far: [theirs, here], fetch_bundle=lambda _: b"")
    ahead.others = lambda keys: {key_of(theirs)}.intersection(keys)
    assert not ahead.look()
    assert ImageMetadata(settings).queue() == [key_of(here)]


def test_a_host_leaves_to_others_what_they_have_or_are_to_fetch_unless_a_task_may_run_here_alone(
    database: Database,
) -> None:
    both, queue = ["alpha", "beta"], ["mine", "theirs", "ours", *(f"nobodys-{n}" for n in range(20))]
    standing(database, "alpha")
    assert left_to_others(database, "alpha", queue) == ()
    standing(database, "beta")
    host_images.report(database, "alpha", ["mine", "ours"])
    host_images.report(database, "beta", ["theirs", "ours"])
    expected = {"theirs", "ours"} | {image for image in queue[3:] if home_of(image, both) == "beta"}
    assert left_to_others(database, "alpha", queue) == expected
    assert 2 < len(expected) < 22
    submit(database, "x", mode=Mode.EPHEMERAL)
    assert left_to_others(database, "alpha", queue) == ()


def test_one_process_of_a_host_cares_for_it_and_the_next_takes_over(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    working: list[str] = []

    def works(name: str) -> dict[str, host_care.Work]:
        def work(stop: threading.Event) -> None:
            working.append(name)
            stop.wait()
            working.remove(name)

        return {"work": work}

    names = iter(("first", "second"))
    monkeypatch.setattr(host_care, "works", lambda *_: works(next(names)))
    monkeypatch.setattr(host_care, "_AWAY_S", 0.05)
    with ExitStack() as first:
        first.enter_context(host_care.caring(settings, database))
        eventually(lambda: working == ["first"], "one that cares")
        with host_care.caring(settings, database):
            time.sleep(0.2)
            assert working == ["first"]
            first.close()
            eventually(lambda: working == ["second"], "the next that cares")
    assert working == []


IMAGE_ID = "sha256:" + "1" * 64


def have(home: Path, image: str) -> None:
    """An image that lies unpacked below a home; it has no layers, and nobody runs it."""
    store = ImageStore(home)
    store.announce(StoredImage(IMAGE_ID, ()))
    store.remember(image, IMAGE_ID)


@pytest.fixture
def start(settings: Settings, home_folder: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Start a standing instance on a host of this name, with a home of its own: a UTS namespace is all it takes."""
    if subprocess.run(["unshare", "--uts", "true"], check=False, capture_output=True).returncode:
        missing("the right to name a host (root)")
    running: list[subprocess.Popen[bytes]] = []

    def start_one(host: str) -> subprocess.Popen[bytes]:
        home = home_folder.parent / host
        home.mkdir()
        have(home, f"on-{host}")
        values = {
            "home": home,
            "database_url": settings.database(),
            "broker_url": settings.broker(),
            "docker_url": "unix:///nowhere.sock",
            "installation": settings.installation,
            "drain_s": 0,
        }
        environ = {**os.environ, **{PREFIX + name.upper(): str(value) for name, value in values.items()}}
        code = "from app.models.spec import Mode; from app.workers.instance import stand; stand(Mode.PERSISTENT, 8)"
        script = f'hostname {host} && exec "$0" -c "$1"'
        with (home / "log").open("wb") as log:
            process = subprocess.Popen(
                ["unshare", "--uts", "sh", "-c", script, sys.executable, code],
                env=environ,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=Path(__file__).parents[2],
            )
        running.append(process)
        return process

    yield start_one
    for process in running:
        process.kill()
        process.wait(SOON_S)
    for log in home_folder.parent.glob("*/log"):
        print(log.parent.name, log.read_text(), sep="\n")  # seen when a test fails


CLAIMS = (
    "SELECT count(*) FROM attempts a JOIN instances i ON i.id = a.instance_id JOIN tasks t ON t.id = a.task_id"
    " WHERE t.run_id = '{run}' AND i.host = '{host}'"
)


def test_workers_on_two_hosts_get_the_tasks_whose_image_they_have_and_those_of_a_host_that_dies(
    settings: Settings,
    database: Database,
    celery: Celery,
    start: Callable[[str], subprocess.Popen[bytes]],
    sent: list[QueuedMessage],
) -> None:
    def send(items: Sequence[QueuedMessage]) -> None:
        publish(celery, items)
        sent.extend(items)

    dispatcher = Dispatcher(database, settings, _nothing, send, key_of)
    alpha, _ = start("alpha"), start("beta")
    eventually(
        lambda: (
            one(database, "SELECT count(*) FROM host_images").count == 2
            and one(database, "SELECT count(*) FROM instances WHERE state = 'ready' AND host IS NOT NULL").count == 2
        ),
        "two hosts that have said what they have",
    )

    def claimed(run: Accepted, host: str) -> bool:
        dispatcher.pass_once()
        return bool(one(database, CLAIMS.format(run=run.run_id, host=host)).count)

    for host in ("beta", "alpha", "beta", "alpha"):
        run = submit(database, f"on-{host}")
        eventually(lambda run=run, host=host: claimed(run, host), f"its task on {host}")  # type: ignore[misc]
    alpha.send_signal(signal.SIGKILL)
    alpha.wait(SOON_S)
    run = submit(database, "on-alpha")
    dispatcher.pass_once()
    assert sent[-1].host == "alpha", "the ledger still believes in the dead host"
    eventually(lambda: claimed(run, "beta"), "the dead host's task on the other")
