"""Removes what belongs to no live instance of this host, or is overdue.

    host_sweep.keep(settings, database, host, stop)

Done at every host that runs tasks, whether or not the control plane is there: a sweeper sees its own disk and engine
only. Two at once, on hosts that share an engine, do each other no harm.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from uuid import UUID

import structlog

from app.environments.sweeper import Sweeper, Swept
from app.errors import DatabaseUnavailable
from app.ledger import host_images, instances
from app.ledger.database import Database, Listener
from app.ledger.events import WORK
from app.settings import Settings

log = structlog.get_logger()

_MOST_REST_S = 2.0
_LISTEN_S = 0.5
"""How long a leaving process may wait for a sweep."""
_STORM_S = 0.2
"""Instances that end together are swept together."""
_LEADS_S = 10.0
"""How long after its last heartbeat the control plane's leader counts as present."""


def keep(settings: Settings, database: Database, host: str, stop: threading.Event) -> None:
    """Sweep every `sweep_s`, and at once when an instance has ended, until told to stop."""
    rounds, listener = Rounds(settings, database, host, stop), Listener(database, WORK)
    try:
        while not stop.is_set():
            try:
                began = time.monotonic()
                rounds.sweep()
                rest_s = min(_MOST_REST_S, 4 * (time.monotonic() - began))
                stop.wait(rest_s)  # when instances end all the time, sweeping takes a fifth of it at most
                _wait(rounds, listener, settings.sweep_s, stop)
            except DatabaseUnavailable as error:
                log.warning("host_sweep.interrupted", reason=str(error))
                stop.wait(1.0)
    finally:
        listener.close()


def _wait(rounds: Rounds, listener: Listener, sweep_s: float, stop: threading.Event) -> None:
    """Until the next round is due; sooner when an instance has ended and may have left something behind."""
    until = time.monotonic() + sweep_s
    while (left_s := until - time.monotonic()) > 0 and not stop.is_set():
        if listener.wait(min(_LISTEN_S, left_s)) != []:
            stop.wait(_STORM_S)
            if rounds.more():
                return


class Rounds:
    """One round after the other, of one host. For one thread."""

    def __init__(self, settings: Settings, database: Database, host: str, stop: threading.Event | None = None) -> None:
        self._settings = settings
        self._database = database
        self._host = host
        self._stop = stop or threading.Event()
        self._sweeper = Sweeper(settings, database, self._stop)
        self._seen: frozenset[UUID] = frozenset()  # ended instances that the last round knew of

    def sweep(self) -> Swept:
        """One round; an instance of which something would not go is swept again by the next.

        Raises: DatabaseUnavailable.
        """
        control = leads_here(self._settings)
        gone = host_images.unswept(self._database, self._host, control=control)
        ended = [one.id for one in gone]
        read_at = time.time()  # before: what is made from here on may be of an instance that the list lacks
        found = self._sweeper.sweep(instances.live_ids(self._database), ended, control=control, read_at=read_at)
        if found.removed or found.refused:
            log.warning("host_sweep.done", host=self._host, removed=found.removed, refused=len(found.refused))
        if not self._stop.is_set():  # else it may have ended early
            left = {refusal.instance_id for refusal in found.refused}
            host_images.swept(self._database, [one.id for one in gone if one.ours and one.id not in left])
        self._seen = frozenset(ended)
        return found

    def more(self) -> bool:
        """Whether an instance has ended that the last round did not know of. Raises: DatabaseUnavailable."""
        gone = host_images.unswept(self._database, self._host, control=leads_here(self._settings))
        return any(one.id not in self._seen for one in gone)


def lead_here(settings: Settings) -> None:
    """Called by the leading reconciler, every second or so: the sweep of this home then includes it."""
    with suppress(OSError):  # where there is no space, the next time will do
        mark = _mark(settings)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def leads_here(settings: Settings) -> bool:
    """Whether the leading reconciler's home is this one: what was launched by it stands here, or on its engine."""
    try:
        age_s = time.time() - _mark(settings).stat().st_mtime
    except OSError:
        return False
    return -_LEADS_S < age_s < _LEADS_S  # one from the future is none: a clock was set back


def _mark(settings: Settings) -> Path:
    return settings.home / "run" / "reconciler-leads"
