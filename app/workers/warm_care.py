"""Ready environments of this host beside the attempts: a standing process makes ahead what the queue needs next.

Only what the tasks will need that may come here, and of that this host's part: the others make theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from app.agents import tool_folder
from app.artifacts import open_store
from app.artifacts.bundles import fetch_bundle
from app.environments import provider_for
from app.environments.base import EnvironmentProvider
from app.environments.image_store.names import key_of
from app.environments.warm import AheadGate, Keeper, Wish
from app.errors import DatabaseUnavailable
from app.ledger import host_images
from app.ledger.database import Database, Listener
from app.ledger.events import WORK
from app.ledger.serving import Serving, serving
from app.ledger.upcoming import NextOne, Upcoming
from app.models.spec import Bundle, EnvironmentKind, Reuse
from app.scheduling.division import Needed, divide
from app.settings import Settings
from app.workers import marks
from app.workers.image_care import StandingGate
from app.workers.stations import workshop_of

_HORIZON = 256
"""Environments at the head of the queue that are looked at: what none of these needs is cold."""
_EACH = 64
"""So many for each of the hosts that share them, when they are many."""
_LOOKED_AT = 512
"""And never more: each host looks whenever something has changed."""
_LISTEN_S = 1.0


class Forecast:
    """What the tasks of this home will need next, as far as it is this home's to make. For one thread.

    host: what this process calls its host; others of the home may have other names.
    """

    def __init__(self, settings: Settings, database: Database, host: str) -> None:
        self._settings = settings
        self._database = database
        self._host = host
        self._upcoming = Upcoming(database, fair=settings.dispatch_order == "fair")

    def __call__(self) -> list[Wish]:
        """Soonest first. Raises: DatabaseUnavailable."""
        ours = marks.hosts_here(self._settings) | {self._host}
        launching = {self._host} if marks.stands(self._settings, marks.DISPATCHES) else ()
        with self._database.begin() as connection:
            found = serving(connection, self._settings, launching)
        lines = {line: hosts for line, hosts in found.items() if ours & hosts.keys()}
        if not lines:
            return []
        others = set[str]().union(*lines.values()) - ours
        needs = self._upcoming.one_by_one(min(_LOOKED_AT, max(_HORIZON, _EACH * (1 + len(others)))), of=lines)
        makers = self._makers(needs, lines) if others else [one.host or self._host for one in needs]
        ours_of = zip(needs, makers, strict=True)
        return [Wish(one.environment, one.timeout_s) for one, maker in ours_of if maker in ours or _lent(one)]

    def _makers(self, needs: Sequence[NextOne], lines: Serving) -> list[str | None]:
        """The host that is to make each of these."""
        asked = [
            Needed(one.line, one.environment.model_dump_json(), key_of(one.environment), one.host) for one in needs
        ]
        with self._database.begin() as connection:
            where = host_images.where(connection, {need.image for need in asked})
        return divide(asked, lines, where)


def _lent(one: NextOne) -> bool:
    """Whether the tasks of a run share it, each host's one of its own: it counts once, wherever they will run."""
    return one.host is None and one.environment.reuse is Reuse.SHARED_READONLY


class Ahead:
    """The ready environments of one host. One of `host_care`'s works."""

    def __init__(self, settings: Settings, database: Database, host: str) -> None:
        self._settings = settings
        self._database = database
        self._host = host
        self._kept: Keeper | None = None

    def ready(self) -> int:
        """How many there are now."""
        return 0 if (kept := self._kept) is None else kept.ready()

    def keep(self, stop: threading.Event) -> None:
        """Keep environments ready until told to stop; afterwards none is left."""
        kept = self._kept = self._keeper()
        done = threading.Event()
        news = threading.Thread(target=_listen, args=(self._database, kept, done), name="warm-news", daemon=True)
        news.start()
        try:
            kept.run(stop)
        finally:
            done.set()

    def _keeper(self) -> Keeper:
        settings = self._settings
        store = open_store(settings.artifacts(), endpoint_url=settings.s3_endpoint_url)
        gate = AheadGate(StandingGate(self._database, settings.lease_s))

        def fetch(bundle: Bundle) -> bytes:
            return fetch_bundle(store, bundle)

        installed = replace(workshop_of(settings), may_install=False)  # whoever works ahead waits for no installation

        def provide(kind: EnvironmentKind) -> EnvironmentProvider:
            tools = partial(tool_folder, workshop=installed)
            return provider_for(kind, settings, fetch_bundle=fetch, gate=gate, tools=tools)

        queue, most = Forecast(settings, self._database, self._host), settings.warm_environments
        return Keeper(settings.home, settings.installation, queue=queue, provide=provide, most=most)


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
