"""Webhooks against a receiver that works, fails, hangs and is away."""

from __future__ import annotations

import hmac
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from uuid import uuid4

import pytest

from app.control.webhooks import SIGNATURE, Webhooks, signature
from app.errors import SpecInvalid, UnknownName
from app.ledger import stream, webhooks
from app.ledger.database import Database
from app.settings import Settings
from tests.integration.http_server import Handler, served
from tests.integration.test_stream import tell
from tests.waiting import eventually, in_background


class Receiver:
    """An HTTP server whose answers a test chooses: a status, or `hang`."""

    def __init__(self) -> None:
        self.answer: int | str = 200
        self.bodies: list[dict[str, Any]] = []
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.let_go = threading.Event()
        receiver = self

        class Chosen(Handler):
            def respond(self) -> None:
                body = self.body()
                receiver.requests.append((dict(self.headers), body))
                answer = receiver.answer
                if answer == "hang":
                    receiver.let_go.wait(20)
                    return
                if answer == 200:
                    receiver.bodies.append(json.loads(body))
                self.answer(int(answer))

        self._running = ExitStack()
        address = self._running.enter_context(served(Chosen))
        self.url = f"http://{address}/hook"

    @property
    def numbers(self) -> list[int]:
        """What was taken, in the order in which it came."""
        return [event["data"]["number"] for body in self.bodies for event in body["events"]]

    def close(self) -> None:
        self.let_go.set()
        self._running.close()


Receivers = Callable[[], Receiver]


@pytest.fixture
def receivers() -> Iterator[Receivers]:
    made: list[Receiver] = []

    def make() -> Receiver:
        made.append(Receiver())
        return made[-1]

    yield make
    for receiver in made:
        receiver.close()


def delivering(database: Database, timeout_s: float = 0.5) -> AbstractContextManager[None]:
    """A control worker's thread of webhooks."""
    settings = Settings(retry_base_s=0.1, retry_cap_s=0.2)
    return in_background(Webhooks(database, settings, timeout_s=timeout_s).run)


def only(database: Database) -> webhooks.Hook:
    (hook,) = webhooks.all_of(database)
    return hook


def test_facts_arrive_in_order_in_batches_and_signed(
    database: Database, receivers: Receivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_SECRET", "a secret")
    receiver, task_id = receivers(), uuid4()
    tell(database, -1)
    webhooks.add(database, receiver.url, ["task."], secret_env="HOOK_SECRET")
    tell(database, *range(250), task=task_id)
    tell(database, 999, kind="attempt.claimed")
    with delivering(database):
        eventually(lambda: len(receiver.numbers) == 250)
        tell(database, 250)
        eventually(lambda: len(receiver.numbers) == 251)
        # At once: what moved over other facts alone is stored every half minute.
        eventually(lambda: only(database).position == receiver.bodies[-1]["position"], within_s=10)
    assert receiver.numbers == list(range(251))
    assert [len(body["events"]) for body in receiver.bodies] == [100, 100, 50, 1]
    first = receiver.bodies[0]["events"][0]
    assert (first["kind"], first["task_id"], first["run_id"]) == ("task.counted", str(task_id), None)
    for headers, body in receiver.requests:
        assert hmac.compare_digest(headers[SIGNATURE], signature("a secret", body))
    assert signature("key", b"The quick brown fox jumps over the lazy dog") == (
        "sha256=f7bc83f430538424b13298e6aa6fb143ef4d59a14946175997479dbc2d1a3cd8"
    )


def test_a_receiver_that_fails_is_tried_again_from_where_it_was(database: Database, receivers: Receivers) -> None:
    receiver = receivers()
    receiver.answer = 500
    webhooks.add(database, receiver.url, ["task."])
    before = only(database).position
    tell(database, 1, 2)
    with delivering(database):
        eventually(lambda: only(database).failures >= 2)
        assert only(database).position == before
        assert only(database).last_error == "expected an answer 2xx, found 500 Internal Server Error"
        tell(database, 3)
        receiver.answer = 302  # not followed, not success
        eventually(lambda: "302" in str(only(database).last_error))
        receiver.answer = 200
        eventually(lambda: receiver.numbers == [1, 2, 3])
        eventually(lambda: only(database).failures == 0, within_s=10)
    assert only(database).last_error is None
    told = stream.read(database, before, wanted=stream.EventFilter(["webhook."])).events
    kinds = [found.event.kind for found in told]  # a failure is told once, however often it is repeated
    assert kinds == ["webhook.added", "webhook.failing", "webhook.recovered"]


def test_one_that_hangs_holds_up_no_other_and_gets_everything_later(database: Database, receivers: Receivers) -> None:
    hanging, well = receivers(), receivers()
    hanging.answer = "hang"
    for receiver in (hanging, well):
        webhooks.add(database, receiver.url, ["task."])
    with delivering(database, timeout_s=1.5):
        tell(database, 1)
        eventually(lambda: hanging.requests)
        for number in (2, 3):
            tell(database, number)
            eventually(lambda n=number: n in well.numbers, within_s=1.4)
        hanging.answer = 200
        eventually(lambda: hanging.numbers == [1, 2, 3])
    assert well.numbers == [1, 2, 3]


def test_two_control_workers_deliver_once_and_the_second_takes_over(database: Database, receivers: Receivers) -> None:
    receiver = receivers()
    webhooks.add(database, receiver.url, ["task."])
    with delivering(database):
        with delivering(database):
            for number in range(20):
                tell(database, number)
            eventually(lambda: len(receiver.numbers) >= 20)
        tell(database, 20)
        eventually(lambda: 20 in receiver.numbers)
    assert receiver.numbers == list(range(21))


def test_nothing_is_sent_unsigned_when_the_secret_is_missing(
    database: Database, receivers: Receivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = receivers()
    webhooks.add(database, receiver.url, secret_env="HOOK_SECRET_THAT_IS_NOT_SET")
    tell(database, 1)
    with delivering(database):
        eventually(lambda: only(database).failures >= 1)
        assert "HOOK_SECRET_THAT_IS_NOT_SET" in str(only(database).last_error)
    assert not receiver.requests


def test_a_removed_webhook_hears_no_more(database: Database, receivers: Receivers) -> None:
    receiver, kept = receivers(), receivers()
    hook = webhooks.add(database, receiver.url, ["task."])
    webhooks.add(database, kept.url, ["task."])
    with delivering(database):
        tell(database, 1)
        eventually(lambda: receiver.numbers == [1] and kept.numbers == [1])
        webhooks.remove(database, str(hook.id)[-12:])
        time.sleep(1.2)
        tell(database, 2)
        eventually(lambda: kept.numbers == [1, 2])
    assert receiver.numbers == [1]
    with pytest.raises(UnknownName, match="unknown webhook"):
        webhooks.remove(database, str(hook.id))


def test_a_url_that_cannot_be_called_is_refused(database: Database) -> None:
    for url in (
        "ftp://example.org",
        "example.org/hook",
        "https://",
        "http://[::1",
        "http://x:99999/",
        "http://a b/",
        "",
    ):
        with pytest.raises(SpecInvalid, match="expected a URL such as"):
            webhooks.add(database, url)
    assert webhooks.all_of(database) == []


def test_what_is_wrong_is_refused_without_showing_secrets(database: Database) -> None:
    with pytest.raises(SpecInvalid) as found:
        webhooks.add(database, "https://me:hunter2@example.org/hook")
    assert "hunter2" not in str(found.value)
    with pytest.raises(SpecInvalid) as found:
        webhooks.add(database, "https://example.org", secret_env="s3cr3t-value!")
    assert "s3cr3t" not in str(found.value)
    with pytest.raises(SpecInvalid, match="kept for the gateway"):
        webhooks.add(database, "https://example.org", secret_env="HOOK_API_KEY")
    with pytest.raises(SpecInvalid, match="expected a kind of event"):
        webhooks.add(database, "https://example.org", ["attempt"])
    with pytest.raises(SpecInvalid, match="a position that the stream gave"):
        webhooks.add(database, "https://example.org", position="yesterday")
    assert webhooks.all_of(database) == []
