"""What this process is: the instance that it hosts, or the control plane's hands. Set once, at its door."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from typing import Protocol
from uuid import UUID

from app.errors import StackNotRunning
from app.ledger import attempts
from app.ledger.attempts import Claim
from app.models.endings import EndReason
from app.models.outcome import Hint
from app.workers.lease import LeaseKeeper
from app.workers.rollout import carry_out
from app.workers.stations import Stations


class Seat:
    """One instance's worker: turns hints into attempts carried out."""

    def __init__(self, instance_id: UUID, stations: Stations, keeper: LeaseKeeper) -> None:
        self.instance_id = instance_id
        self.stations = stations
        self.keeper = keeper
        self.closing = threading.Event()

    def take(self, hint: Hint) -> str:
        """Claim what the hint names, or failing that whatever waits for this kind of instance, and carry it out."""
        if self.closing.is_set():
            return "closing"
        lease_s = self.stations.settings.lease_s
        database = self.stations.database
        claimed = attempts.claim(database, hint, self.instance_id, lease_s=lease_s)
        claimed = claimed or attempts.claim_any(database, self.instance_id, lease_s=lease_s)
        return self._carry_out(claimed).value if claimed is not None else "stale"

    def _carry_out(self, claimed: Claim) -> EndReason:
        with self.keeper.hold(claimed) as token:
            if self.closing.is_set():
                token.stop(EndReason.INTERRUPTED)
            return carry_out(claimed, self.stations, token)

    def interrupt(self) -> None:
        """Give everything back: attempts end as interrupted and do not use up a retry."""
        self.closing.set()
        self.keeper.stop_all(EndReason.INTERRUPTED)


class Ticker(Protocol):
    """What beat's tick does; the control worker brings it."""

    def tick(self, now: datetime) -> int: ...


class _Process:
    seat: Seat | None = None
    ticker: Ticker | None = None


def sit(seat: Seat) -> None:
    """This process hosts an instance."""
    _Process.seat = seat


def serve_ticks(ticker: Ticker) -> None:
    """This process is a control worker."""
    _Process.ticker = ticker


def current() -> Seat:
    """Raises: StackNotRunning: a plain Celery worker took the queue of instances."""
    if _Process.seat is None:
        raise StackNotRunning("this worker is no instance; expected one started by a provider or `megaflow worker`")
    return _Process.seat


def tick() -> int:
    """Raises: StackNotRunning: not a control worker."""
    if _Process.ticker is None:
        raise StackNotRunning("this worker serves no schedules; expected the control worker")
    return _Process.ticker.tick(datetime.now(UTC))
