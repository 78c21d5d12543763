"""Removes what belongs to no live instance of this host, or is past its deadline.

    host_sweep.keep(settings, database, host, stop)

Runs on every host that runs tasks, with or without the control plane: a sweeper sees only its own disk and engine.
Two sweepers at the same time, on hosts that share an engine, do not conflict.
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
"""Limit of one wait for a notification; a stop is noticed only after it."""
_STORM_S = 0.2
"""Waiting time after an instance's end: instances that end together are swept together."""
_LEADS_S = 10.0
"""Time after its last heartbeat for which the control plane's leader counts as present."""


def keep(settings: Settings, database: Database, host: str, stop: threading.Event) -> None:
    """Sweeps every `sweep_s`, and at once when an instance has ended, until `stop` is set."""
    rounds, listener = Rounds(settings, database, host, stop), Listener(database, WORK)
    try:
        while not stop.is_set():
            try:
                began = time.monotonic()
                rounds.sweep()
                rest_s = min(_MOST_REST_S, 4 * (time.monotonic() - began))
                stop.wait(rest_s)  # if instances end all the time, sweeping takes at most 20% of the time
                _wait(rounds, listener, settings.sweep_s, stop)
            except DatabaseUnavailable as error:
                log.warning("host_sweep.interrupted", reason=str(error))
                stop.wait(1.0)
    finally:
        listener.close()


def _wait(rounds: Rounds, listener: Listener, sweep_s: float, stop: threading.Event) -> None:
    """Waits until the next round is due; less if an instance has ended and may have left something."""
    until = time.monotonic() + sweep_s
    while (left_s := until - time.monotonic()) > 0 and not stop.is_set():
        if listener.wait(min(_LISTEN_S, left_s)) != []:
            stop.wait(_STORM_S)
            if rounds.more():
                return


class Rounds:
    """Sweep rounds of one host. For one thread."""

    def __init__(self, settings: Settings, database: Database, host: str, stop: threading.Event | None = None) -> None:
        self._settings = settings
        self._database = database
        self._host = host
        self._stop = stop or threading.Event()
        self._sweeper = Sweeper(settings, database, self._stop)
        self._seen: frozenset[UUID] = frozenset()  # ended instances known to the last round

    def sweep(self) -> Swept:
        """Sweeps once. If something of an instance could not be removed, the next round sweeps it again.

        Raises: DatabaseUnavailable.
        """
        control = leads_here(self._settings)
        ended_instances = host_images.unswept(self._database, self._host, control=control)
        ended_ids = [one.id for one in ended_instances]
        read_at = time.time()  # first: things created later may belong to an instance not in the list
        result = self._sweeper.sweep(instances.live_ids(self._database), ended_ids, control=control, read_at=read_at)
        if result.removed or result.refused:
            log.warning("host_sweep.done", host=self._host, removed=result.removed, refused=len(result.refused))
        if not self._stop.is_set():  # if stopped, the sweep may be incomplete
            left = {refusal.instance_id for refusal in result.refused}
            host_images.swept(self._database, [one.id for one in ended_instances if one.ours and one.id not in left])
        self._seen = frozenset(ended_ids)
        return result

    def more(self) -> bool:
        """Whether an instance has ended that was unknown to the last round. Raises: DatabaseUnavailable."""
        instances = host_images.unswept(self._database, self._host, control=leads_here(self._settings))
        return any(one.id not in self._seen for one in instances)


def lead_here(settings: Settings) -> None:
    """Marks this home as the leading reconciler's: its sweep then includes it. Called about every second."""
    with suppress(OSError):  # if there is no space, the next call tries again
        mark = _mark(settings)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def leads_here(settings: Settings) -> bool:
    """Whether the leading reconciler uses this home: its instances then run on this host or on its engine."""
    try:
        age_s = time.time() - _mark(settings).stat().st_mtime
    except OSError:
        return False
    return -_LEADS_S < age_s < _LEADS_S  # a mark from the future does not count: the clock was set back


def _mark(settings: Settings) -> Path:
    return settings.home / "run" / "reconciler-leads"
