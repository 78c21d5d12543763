"""Ready environments of this host beside the attempts: a standing process makes ahead what the queue needs next.

warm_care.keep(settings, database, stop)
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial

from app.agents import tool_folder
from app.artifacts import open_store
from app.artifacts.bundles import fetch_bundle
from app.environments import provider_for
from app.environments.base import EnvironmentProvider
from app.environments.warm import AheadGate, Keeper, Wish
from app.errors import DatabaseUnavailable
from app.ledger.database import Database, Listener
from app.ledger.events import WORK
from app.ledger.upcoming import Upcoming
from app.models.spec import Bundle, EnvironmentKind
from app.settings import Settings
from app.workers.image_care import StandingGate
from app.workers.stations import workshop_of

_HORIZON = 256
"""Environments at the head of the queue that are looked at: what none of these needs is cold."""
_LISTEN_S = 1.0


def keeper(settings: Settings, database: Database) -> Keeper:
    """Ready to `run`, in a thread."""
    upcoming = Upcoming(database, fair=settings.dispatch_order == "fair")
    store = open_store(settings.artifacts(), endpoint_url=settings.s3_endpoint_url)
    gate = AheadGate(StandingGate(database, settings.lease_s))

    def queue() -> list[Wish]:
        return [Wish(one.environment, one.timeout_s) for one in upcoming.one_by_one(_HORIZON)]

    def fetch(bundle: Bundle) -> bytes:
        return fetch_bundle(store, bundle)

    installed = replace(workshop_of(settings), may_install=False)  # whoever works ahead waits for no installation

    def provide(kind: EnvironmentKind) -> EnvironmentProvider:
        tools = partial(tool_folder, workshop=installed)
        return provider_for(kind, settings, fetch_bundle=fetch, gate=gate, tools=tools)

    return Keeper(settings.home, settings.installation, queue=queue, provide=provide, most=settings.warm_environments)


def keep(settings: Settings, database: Database, stop: threading.Event) -> None:
    """Keep environments ready until told to stop; afterwards none is left. One of `host_care`'s works."""
    kept = keeper(settings, database)
    done = threading.Event()
    news = threading.Thread(target=_listen, args=(database, kept, done), name="warm-news", daemon=True)
    news.start()
    try:
        kept.run(stop)
    finally:
        done.set()


def _listen(database: Database, kept: Keeper, stop: threading.Event) -> None:
    """What was accepted needs its environments before anybody has looked again."""
    listener = Listener(database, WORK)
    while not stop.is_set():
        try:
            if listener.wait(_LISTEN_S) != []:
                kept.wake()
        except DatabaseUnavailable:
            stop.wait(_LISTEN_S)
    listener.close()
