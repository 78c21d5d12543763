"""Prefetches images of this host in the background, within its limits."""

from __future__ import annotations

from app.artifacts import open_store
from app.artifacts.bundles import fetch_bundle
from app.images.prefetch import Prefetcher
from app.ledger.database import Database
from app.ledger.upcoming import MOST, Upcoming
from app.models.spec import Bundle, EnvironmentSpec
from app.settings import Settings
from app.workers.semaphores import LedgerSemaphore

_NEAR = 256
"""Tasks at the head of the queue: enough to pull ahead by."""


def prefetcher(settings: Settings, database: Database) -> Prefetcher:
    """Ready to `run`, in a thread of a process that stands and does not fork."""
    upcoming = Upcoming(database, fair=settings.dispatch_order == "fair")
    store = open_store(settings.artifacts(), endpoint_url=settings.s3_endpoint_url)

    def queue(far: bool) -> list[EnvironmentSpec]:
        return [need.environment for need in upcoming.needs(MOST if far else _NEAR)]

    def fetch(bundle: Bundle) -> bytes:
        return fetch_bundle(store, bundle)

    return Prefetcher(
        settings, queue=queue, fetch_bundle=fetch, semaphore=LedgerSemaphore(database, lease_s=settings.lease_s)
    )
