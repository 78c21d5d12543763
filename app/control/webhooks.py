"""Delivers events to webhooks by HTTP POST: at least once, in order per webhook, independent of each other.

One control worker delivers at a time. Each webhook has its own thread, so that a receiver that hangs delays no other.
The position is stored only after the receiver has answered 2xx. If that answer or the store is lost, the batch is sent
again: a receiver that must not count twice remembers the last `id` (or `position`) that it has processed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import random
import threading
import time
from uuid import UUID

import httpx
import structlog

from app.errors import DatabaseUnavailable, SpecInvalid
from app.ledger import stream, webhooks
from app.ledger.database import Database, Leadership, Listener
from app.ledger.events import OUTCOME, WORK
from app.ledger.stream import EventFilter, Page
from app.ledger.webhooks import Hook
from app.settings import Settings

log = structlog.get_logger()

WEBHOOKS = 73053
"""Advisory lock of the process that delivers."""
BATCH = 100
"""Most events in one request."""
SIGNATURE = "X-MegaFlow-Signature"
"""Header: `sha256=` and the hexadecimal HMAC-SHA256 of the body, when the webhook has a secret."""

_LOOK_S = 1.0
"""Seconds between two reads of the list of webhooks."""
_STORE_S = 30.0
"""Seconds between two stores of a position that has only passed events which the webhook does not want."""


def signature(secret: str, body: bytes) -> str:
    """Returns the value of the signature header. A receiver compares it with `hmac.compare_digest`."""
    return "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


class Webhooks:
    """Runs a sender per webhook; `run` blocks until `stop` is set. One process delivers, the others stand by.

    `timeout_s`: seconds that a receiver may be silent.
    """

    def __init__(self, database: Database, settings: Settings, *, timeout_s: float = 10.0) -> None:
        self.database = database
        self.settings = settings
        self.timeout_s = timeout_s
        self.news = threading.Condition()
        self._guard = threading.Lock()
        self._lead: Leadership | None = None
        self._couriers: dict[UUID, _WebhookSender] = {}

    def run(self, stop: threading.Event) -> None:
        self._lead = Leadership(self.database, WEBHOOKS)
        listener = Listener(self.database, WORK, OUTCOME)
        try:
            while not stop.is_set():
                try:
                    self._look()
                    self._pass_on(listener, stop)
                except DatabaseUnavailable as error:
                    log.warning("webhooks.interrupted", error=str(error))
                    stop.wait(1.0)
        finally:
            listener.close()
            self._dismiss()

    def leads(self) -> bool:
        """Whether this process is the one that delivers. Raises: DatabaseUnavailable."""
        with self._guard:
            return self._lead is not None and self._lead.held()

    def _look(self) -> None:
        """Starts a sender for every webhook while this process delivers; stops those of removed webhooks."""
        hooks = {hook.id: hook for hook in webhooks.all_of(self.database)} if self.leads() else {}
        for hook_id in [*self._couriers]:
            if hook_id not in hooks:
                self._couriers.pop(hook_id).stop.set()
        for hook_id, hook in hooks.items():
            if hook_id not in self._couriers or not self._couriers[hook_id].is_alive():
                self._couriers[hook_id] = _WebhookSender(self, hook)
                self._couriers[hook_id].start()

    def _pass_on(self, listener: Listener, stop: threading.Event) -> None:
        """Wakes the senders at every wake-up message, until it is time to read the webhooks again."""
        until = time.monotonic() + _LOOK_S
        while time.monotonic() < until and not stop.is_set():
            stream.wait_for_news(listener, stop)
            with self.news:
                self.news.notify_all()

    def _dismiss(self) -> None:
        """Stops all senders. Releases the lock first, so that no sender begins another request."""
        with self._guard:
            if self._lead is not None:
                self._lead.release()
            self._lead = None
        for sender in self._couriers.values():
            sender.stop.set()
        with self.news:
            self.news.notify_all()
        until = time.monotonic() + self.timeout_s
        for sender in self._couriers.values():
            sender.join(max(0.0, until - time.monotonic()))
        self._couriers.clear()


class _WebhookSender(threading.Thread):
    """Sends one webhook's events in batches, until stopped or until another process has changed the row."""

    def __init__(self, office: Webhooks, hook: Hook) -> None:
        super().__init__(name=f"webhook-{hook.id}", daemon=True)
        self.stop = threading.Event()
        self._office = office
        self._database = office.database
        self._hook = hook
        self._wanted = EventFilter(hook.kinds)
        self._position = self._stored = hook.position
        self._stored_at = time.monotonic()
        self._failures = hook.failures

    def run(self) -> None:
        self.stop.wait(self._hook.wait_s)
        with httpx.Client(timeout=httpx.Timeout(self._office.timeout_s), follow_redirects=False) as client:
            while not self.stop.is_set():
                try:
                    self._carry(client)
                except DatabaseUnavailable as error:
                    log.warning("webhook.interrupted", webhook=str(self._hook.id), error=str(error))
                    self.stop.wait(1.0)

    def _carry(self, client: httpx.Client) -> None:
        try:
            page = stream.read(self._database, self._position, BATCH, self._wanted)
        except SpecInvalid as error:  # the position is not of this database
            self._failed(str(error))
            return
        if not page.events:
            self._pass_over(page.position)
        elif not self._office.leads():
            self.stop.set()
        else:
            fault = self._send(client, page)
            if fault is None:
                self._delivered(page)
            else:
                self._failed(fault)

    def _send(self, client: httpx.Client, page: Page) -> str | None:
        """Sends a batch. Returns None when the receiver has it, else the error."""
        content = {"position": page.position, "events": [event.body() for event in page.events]}
        body = json.dumps(content, separators=(",", ":")).encode()
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "megaflow",
            "X-MegaFlow-Webhook": str(self._hook.id),
        }
        if self._hook.secret_env is not None:
            secret = self._office.settings.secret(self._hook.secret_env)
            if secret is None:  # never unsigned
                return f"expected a secret in {self._hook.secret_env}, found none in the control worker's environment"
            headers[SIGNATURE] = signature(secret.get_secret_value(), body)
        try:
            # The status is enough: the answer, which may be long, is not read.
            with client.stream("POST", self._hook.url, content=body, headers=headers) as response:
                if response.is_success:
                    return None
                return f"expected an answer 2xx, found {response.status_code} {response.reason_phrase}"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"{type(error).__name__}: {error}"

    def _delivered(self, page: Page) -> None:
        """Stores the position, retrying until stopped: a batch must not be sent again after a short outage."""
        while True:
            try:
                is_current = webhooks.delivered(self._database, self._hook.id, self._stored, page.position)
                break
            except DatabaseUnavailable:
                if self.stop.wait(0.5):
                    return
        if self._failures:
            log.info("webhook.recovered", webhook=str(self._hook.id), failures=self._failures)
        self._failures = 0
        self._moved(page.position, is_current)

    def _failed(self, fault: str) -> None:
        self._failures += 1
        wait_s = self._backoff_s()
        log.warning("webhook.failed", webhook=str(self._hook.id), error=fault, failures=self._failures, wait_s=wait_s)
        if not webhooks.failed(self._database, self._hook.id, self._stored, fault, wait_s):
            self.stop.set()
        self.stop.wait(wait_s)

    def _backoff_s(self) -> float:
        settings = self._office.settings
        bound = min(settings.retry_cap_s, settings.retry_base_s * 2.0 ** min(self._failures - 1, 30))
        return max(0.1, bound * random.uniform(0.5, 1.0))

    def _pass_over(self, position: str) -> None:
        self._position = position
        if position != self._stored and time.monotonic() - self._stored_at > _STORE_S:
            self._moved(position, webhooks.passed_over(self._database, self._hook.id, self._stored, position))
        with self._office.news:
            self._office.news.wait(0.5)

    def _moved(self, position: str, mine: bool) -> None:
        """Notes the stored position. `mine` False: another process changed the row, or it was removed; then stops."""
        self._position = self._stored = position
        self._stored_at = time.monotonic()
        if not mine:
            self.stop.set()
