"""Prefetches images of this host in the background, within its limits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from uuid import UUID

from sqlalchemy.exc import DBAPIError
from uuid_utils import compat as uuids

from app.artifacts import open_store
from app.artifacts.bundles import fetch_bundle
from app.errors import DatabaseUnavailable
from app.images.prefetch import Prefetcher
from app.ledger import semaphores
from app.ledger.database import Database
from app.ledger.upcoming import MOST, Upcoming
from app.models.spec import Bundle, EnvironmentSpec
from app.settings import Settings

_LOOK_S = 0.5
_NEAR = 256
"""Tasks at the head of the queue: enough to pull ahead by."""


class HostSemaphoreLease:
    """Implements the environments' `Semaphore` for work that belongs to no attempt: keeps its own places alive."""

    def __init__(self, database: Database, lease_s: float) -> None:
        self._database = database
        self._lease_s = lease_s

    @contextmanager
    def hold(self, limit: str, capacity: int | None, *, timeout_s: float) -> Iterator[None]:
        """A place at `limit` for the block.

        Raises: TimeoutError: none was free in time; DatabaseUnavailable.
        """
        holder, deadline = uuids.uuid7(), time.monotonic() + timeout_s
        done = threading.Event()
        try:
            while not self._ask(limit, capacity, holder):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"no place at {limit} was free in time (`megaflow limits` shows who has them)")
                time.sleep(_LOOK_S)
            threading.Thread(target=self._renew, args=(holder, done), name="semaphore-renewal", daemon=True).start()
            yield
        finally:
            done.set()
            with suppress(DatabaseUnavailable, DBAPIError):  # it lapses
                semaphores.release(self._database, limit, holder)

    def _ask(self, limit: str, capacity: int | None, holder: UUID) -> bool:
        try:
            answer = semaphores.ask(self._database, limit, holder, capacity_default=capacity, lease_s=self._lease_s)
        except DBAPIError as error:
            raise DatabaseUnavailable(f"the ledger did not give a place: {error}; try `megaflow doctor`") from error
        return answer.granted

    def _renew(self, holder: UUID, done: threading.Event) -> None:
        while not done.wait(self._lease_s / 3):
            with suppress(DatabaseUnavailable, DBAPIError):
                semaphores.renew(self._database, [holder], lease_s=self._lease_s)


def prefetcher(settings: Settings, database: Database) -> Prefetcher:
    """Ready to `run`, in a thread of a process that stands and does not fork."""
    upcoming = Upcoming(database, fair=settings.dispatch_order == "fair")
    store = open_store(settings.artifacts(), endpoint_url=settings.s3_endpoint_url)

    def queue(far: bool) -> list[EnvironmentSpec]:
        return [need.environment for need in upcoming.needs(MOST if far else _NEAR)]

    def fetch(bundle: Bundle) -> bytes:
        return fetch_bundle(store, bundle)

    return Prefetcher(
        settings, queue=queue, fetch_bundle=fetch, semaphore=HostSemaphoreLease(database, settings.lease_s)
    )
