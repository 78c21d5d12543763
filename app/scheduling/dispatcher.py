"""The dispatcher: admits what has a slot, asks for the instances that it needs, publishes the hints.

Woken by NOTIFY, decides in batches; any number may stand by, one decides at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import cast
from uuid import UUID

import structlog
from sqlalchemy import Connection

from app.errors import DatabaseUnavailable, InstanceFailed
from app.ledger import attempts, instances, waiting
from app.ledger.attempts import Published, RetryPolicy
from app.ledger.database import DISPATCHER, Database, Leadership, Listener
from app.ledger.events import WORK
from app.ledger.instances import Wanted
from app.models.instance import InstanceRequest
from app.models.spec import Mode
from app.scheduling import policy
from app.scheduling.policy import Line
from app.settings import Settings

log = structlog.get_logger()

Launch = Callable[[str, Sequence[InstanceRequest]], dict[UUID, str]]
"""Asks a provider, by name, for instances; the handles of those that were started. Raises: InstanceFailed."""
Publish = Callable[[Sequence[Published]], None]
"""Puts hints into their queues. Raises what the broker raises: they are sent again later."""

_STANDARD = "standard"
_REST_S = 0.5
"""A provider that cannot be reached is left alone for so long."""
_STILLBORN = 5
"""After so many instances in a row that died before they were ready, no more are asked for until time has passed."""


class Dispatcher:
    """One stand-by or deciding dispatcher; `run` blocks until told to stop."""

    def __init__(self, database: Database, settings: Settings, launch: Launch, publish: Publish) -> None:
        self._database = database
        self._settings = settings
        self._launch = launch
        self._publish = publish
        self._retry = RetryPolicy(settings.retry_base_s, settings.retry_cap_s)
        self._rests_until: dict[str, float] = {}  # provider: monotonic seconds

    def run(self, stop: threading.Event) -> None:
        """Decide whenever something has changed, and at least every second."""
        lead, listener = Leadership(self._database, DISPATCHER), Listener(self._database, WORK)
        try:
            while not stop.is_set():
                try:
                    if lead.held():
                        while self.pass_once() and not stop.is_set():
                            pass
                    listener.wait(1.0)
                except DatabaseUnavailable as error:
                    log.warning("dispatcher.database_unavailable", error=str(error))
                    stop.wait(1.0)
        finally:
            listener.close()
            lead.release()

    def pass_once(self) -> bool:
        """One look, one batch. True when there may be more to do at once."""
        with self._database.begin() as connection:
            seen = waiting.occupancy(connection)
            free = policy.free_slots(self._capacity(seen), seen.live)
            lines = self._lines(connection, free)
            chosen = cast("list[tuple[UUID, Mode]]", policy.admit(lines, free))
            admitted = attempts.admit(connection, chosen) if chosen else []
            seen.unclaimed.update((item.mode, item.resource_class) for item in admitted)
            wanted = self._wanted(seen)
            requested = [(want, instances.request(connection, want)) for want in wanted]
            due = admitted + attempts.unpublished(connection, self._settings.republish_s, 1000)
        for want, ids in requested:
            self._start(want, ids)
        hints = {item.hint.attempt_id: item for item in due}
        self._send(hints)
        if admitted:
            log.info("dispatcher.admitted", attempts=len(admitted), hints=len(hints))
        return len(admitted) >= self._settings.dispatch_batch

    def _capacity(self, seen: waiting.Occupancy) -> dict[policy.Key, int]:
        """Slots by mode: what the host can carry for ephemeral, what the standing instances offer for persistent."""
        capacity = {key: slots for key, slots in seen.slots.items() if key[0] is Mode.PERSISTENT}
        capacity[Mode.EPHEMERAL, _STANDARD] = self._settings.capacity()
        return capacity

    def _lines(self, connection: Connection, free: dict[policy.Key, int]) -> list[Line]:
        room = {mode: sum(n for key, n in free.items() if key[0] is mode) for mode in Mode}
        room[Mode.AUTO] = sum(room.values())
        return [
            Line(candidate.task_id, candidate.mode, candidate.resource_class)
            for mode, places in room.items()
            if places
            for candidate in waiting.candidates(connection, mode, min(places, self._settings.dispatch_batch))
        ]

    def _wanted(self, seen: waiting.Occupancy) -> list[Wanted]:
        settings = self._settings
        wanted = [
            Wanted(settings.ephemeral_provider, mode, resource_class, 1, gap, settings.ephemeral_lifetime_s)
            for (mode, resource_class), gap in policy.missing_ephemeral(seen.unclaimed, seen.coming).items()
            if seen.stillborn[mode, resource_class] < _STILLBORN
        ]
        standing = settings.persistent_instances - seen.instances[Mode.PERSISTENT, _STANDARD]
        if standing > 0 and seen.stillborn[Mode.PERSISTENT, _STANDARD] < _STILLBORN:
            provider, slots = settings.persistent_provider, settings.persistent_slots
            wanted.append(Wanted(provider, Mode.PERSISTENT, _STANDARD, slots, standing, None))
        now = time.monotonic()
        return [want for want in wanted if self._rests_until.get(want.provider, 0.0) <= now]

    def _start(self, want: Wanted, ids: Sequence[UUID]) -> None:
        """Ask the provider; whatever it could not start is closed at once, and asked for again at the next look."""
        requests = [
            InstanceRequest(
                instance_id=instance_id,
                mode=want.mode,  # type: ignore[arg-type]
                resource_class=want.resource_class,
                slots=want.slots,
                lifetime_s=want.lifetime_s,
            )
            for instance_id in ids
        ]
        why = "the provider did not start it"
        handles: dict[UUID, str] = {}
        try:
            handles = self._launch(want.provider, requests)
        except InstanceFailed as error:
            why = str(error)
            self._rests_until[want.provider] = time.monotonic() + _REST_S
            log.warning("dispatcher.launch_failed", provider=want.provider, error=why)
        instances.launched(self._database, handles)
        for instance_id in ids:
            if instance_id not in handles:
                instances.exited(self._database, instance_id, None, why, self._retry)

    def _send(self, due: dict[UUID, Published]) -> None:
        if not due:
            return
        items = list(due.values())
        try:
            self._publish(items)
        except Exception as error:  # noqa: BLE001  whatever a broker raises, the rows are safe and sent again
            log.warning("dispatcher.publish_failed", hints=len(items), error=str(error))
            return
        with self._database.begin() as connection:
            attempts.mark_published(connection, items)
