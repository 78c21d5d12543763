"""Hints on their way to a real Redis that goes silent: the dispatcher loses seconds, and nothing else."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from uuid import UUID

import pytest
import redis as redis_client
from celery import Celery
from kombu.exceptions import BatchPublishError, OperationalError

from app.ledger.admission import QueuedMessage
from app.ledger.database import Database
from app.models.instance import InstanceRequest, queue_of
from app.models.outcome import WakeUpMessage
from app.models.spec import Mode
from app.scheduling.dispatcher import Dispatcher
from app.settings import Settings
from app.tasks.attempt import publish
from tests.building import accepted, new_id
from tests.chaos.relay import Relay
from tests.integration.rows import one
from tests.services import MakeSettings

QUEUE = queue_of(Mode.EPHEMERAL, "standard")
SOON_S = 30.0
"""More than the patience with a silent broker, and much less than that of a worker's connection."""


@pytest.fixture
def relay(redis_url: str, home_folder: Path) -> Iterator[Relay]:
    made = Relay(home_folder.parent / "r.sock", Path(redis_url.removeprefix("unix://").partition("?")[0]))
    yield made
    made.close()


@pytest.fixture
def settings(make_settings: MakeSettings, relay: Relay, home_folder: Path) -> Settings:
    return make_settings(broker_url=f"redis+socket://{home_folder.parent / 'r.sock'}", persistent_instances=0)


def a_hint() -> QueuedMessage:
    return QueuedMessage(WakeUpMessage(attempt_id=new_id(), number=1), Mode.EPHEMERAL, "standard")


def go_silent(relay: Relay) -> None:
    """Connections stay open and can be made, and carry nothing."""
    relay.freeze()
    relay.deafen()


@pytest.mark.parametrize("hints", [pytest.param(1, marks=pytest.mark.extra), 300])
def test_a_silent_broker_is_given_up_within_seconds_and_served_again_when_it_answers(
    celery: Celery, relay: Relay, redis_url: str, hints: int
) -> None:
    items = [a_hint() for _ in range(hints)]
    publish(celery, items)
    go_silent(relay)
    for _ in ("over the old connection", "over a new one"):
        begun = time.monotonic()
        with pytest.raises((BatchPublishError, OperationalError)):
            publish(celery, items)
        assert time.monotonic() - begun < SOON_S
    relay.hear()
    publish(celery, items)
    with redis_client.Redis.from_url(redis_url) as client:
        assert client.llen(QUEUE) >= 2 * hints


def test_what_was_sent_is_told_to_flower(celery: Celery, redis_url: str) -> None:
    sent = a_hint()
    with redis_client.Redis.from_url(redis_url) as client, client.pubsub() as events:
        events.psubscribe("*celeryev/task.sent")
        assert events.get_message(timeout=5) is not None
        publish(celery, [sent])
        heard = events.get_message(timeout=5)
    assert heard is not None
    event = json.loads(base64.b64decode(json.loads(heard["data"])["body"]))
    assert (event["uuid"], event["queue"], event["name"]) == (str(sent.message.attempt_id), QUEUE, "attempt.run")


def test_a_dispatcher_before_a_silent_broker_goes_on_and_sends_the_hint_later(
    celery: Celery, relay: Relay, settings: Settings, redis_url: str
) -> None:
    def launch(_provider: str, requests: Sequence[InstanceRequest]) -> dict[UUID, str]:
        return {request.instance_id: "1" for request in requests}

    database = Database(settings.database())
    try:
        dispatcher = Dispatcher(database, settings, launch, partial(publish, celery))
        publish(celery, [a_hint()])
        accepted(database, 1, mode=Mode.EPHEMERAL)
        go_silent(relay)
        begun = time.monotonic()
        dispatcher.pass_once()
        assert time.monotonic() - begun < SOON_S
        assert one(database, "SELECT published_at FROM attempts").published_at is None
        assert one(database, "SELECT count(*) FROM instances").count == 1
        relay.hear()
        dispatcher.pass_once()
        assert one(database, "SELECT published_at FROM attempts").published_at is not None
        with redis_client.Redis.from_url(redis_url) as client:
            assert client.llen(QUEUE) >= 2
    finally:
        database.close()
