"""Renews all leases of a worker in one statement, and stops attempts.

A worker that cannot renew stops its own work before the lease lapses: an attempt may run twice in sequence, but never
twice at the same time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from uuid import UUID

import structlog

from app.errors import DatabaseUnavailable
from app.ledger import attempts, instances
from app.ledger.attempts import Claim
from app.ledger.database import Database
from app.models.endings import EndReason
from app.models.states import InstanceState
from app.settings import Settings
from app.stopping import StopListener

log = structlog.get_logger()


class StopToken:
    """Implements `CancelToken`, with the reason."""

    def __init__(self) -> None:
        self.reason: EndReason | None = None
        self.on_wake: Callable[[], None] | None = None  # called on a wake-up message for the attempt; must not block
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def is_set(self) -> bool:
        return self.reason is not None

    def stop(self, reason: EndReason) -> None:
        """Stops the attempt. Only the first reason counts."""
        with self._lock:
            if self.reason is not None:
                return
            self.reason = reason
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception:
                log.exception("attempt.stop_callback_failed")

    def on_cancel(self, callback: Callable[[], None]) -> Callable[[], None]:
        with self._lock:
            if self.reason is None:
                self._callbacks.append(callback)
                return lambda: self._forget(callback)
        callback()
        return lambda: None

    def _forget(self, callback: Callable[[], None]) -> None:
        with self._lock, suppress(ValueError):
            self._callbacks.remove(callback)


class LeaseRenewer:
    """Renews the leases of all attempts of a worker in one thread, and learns which attempts must stop."""

    def __init__(self, database: Database, settings: Settings, instance_id: UUID) -> None:
        self._database = database
        self._settings = settings
        self._instance_id = instance_id
        self._held: dict[UUID, StopToken] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease-renewer", daemon=True)
        self._guard = threading.Thread(target=self._watch, name="lease-guard", daemon=True)
        self._renewed_at = time.monotonic()
        self.orphaned = threading.Event()  # instance unknown to the ledger, or ledger unreachable
        self.draining = threading.Event()  # finish current attempts, take no new ones, exit

    def start(self) -> None:
        self._thread.start()
        self._guard.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=5)

    def take(self, claimed: Claim) -> StopToken:
        """Renews the claim's lease from now on, until `drop`."""
        token = StopToken()
        with self._lock:
            self._held[claimed.attempt_id] = token
        return token

    def drop(self, claimed: Claim) -> None:
        """Stops renewing: the attempt has ended or belongs to another worker."""
        with self._lock:
            self._held.pop(claimed.attempt_id, None)

    def in_hand(self, attempt_id: UUID) -> bool:
        """Whether this worker runs the attempt now."""
        with self._lock:
            return attempt_id in self._held

    def busy(self) -> int:
        """Returns the number of running attempts."""
        with self._lock:
            return len(self._held)

    def stop_all(self, reason: EndReason) -> None:
        """Stops every attempt of this worker."""
        with self._lock:
            tokens = list(self._held.values())
        for token in tokens:
            _stop_aside(token, reason)

    def _run(self) -> None:
        listener = StopListener(self._settings)
        period_s = self._settings.lease_s / 3
        due = time.monotonic() + period_s
        while not self._closing.is_set():
            try:
                named = listener.listen(max(0.05, min(1.0, due - time.monotonic())))
                self._wake(named)
                # A message only gives ids. The ledger has the reason; a named instance must read its own row.
                if time.monotonic() >= due or self._instance_id in named or any(map(self.in_hand, named)):
                    due = time.monotonic() + period_s
                    self._renew()
            except Exception:  # must not end by any error: the worker would lose all its leases
                log.exception("lease.renewal_failed")
                self._closing.wait(1.0)
        listener.close()

    def _wake(self, named: Sequence[UUID]) -> None:
        with self._lock:
            tokens = [self._held[one] for one in named if one in self._held]
        for token in tokens:
            if token.on_wake is not None:
                token.on_wake()

    def _watch(self) -> None:
        """Stops the work before its leases lapse, even if the renewer hangs in a call that does not return."""
        while not self._closing.wait(0.5):
            if time.monotonic() - self._renewed_at > self._settings.lease_s * 0.8:
                self.stop_all(EndReason.LOST)

    def _renew(self) -> None:
        began = time.monotonic()
        with self._lock:
            held = list(self._held)
        try:
            state = instances.seen(self._database, self._instance_id)
            if state is None:
                self.orphaned.set()
            elif state is InstanceState.DRAINING:
                self.draining.set()
            lease_s, me = self._settings.lease_s, self._instance_id
            answers = attempts.renew(self._database, held, lease_s=lease_s, instance_id=me) if held else {}
        except DatabaseUnavailable as error:
            log.warning("lease.not_renewed", error=str(error))
            silent_s = time.monotonic() - self._renewed_at
            if silent_s > self._settings.orphan_s:
                log.error("instance.control_plane_gone", silent_s=round(silent_s))
                self.orphaned.set()
            return
        self._renewed_at = began
        for attempt_id in held:
            reason = answers.get(attempt_id, EndReason.LOST)
            if reason is not None:
                self._stop(attempt_id, reason)

    def _stop(self, attempt_id: UUID, reason: EndReason) -> None:
        with self._lock:
            token = self._held.get(attempt_id)
        if token is not None:
            _stop_aside(token, reason)


def _stop_aside(token: StopToken, reason: EndReason) -> None:
    """Stops an attempt in its own thread: ending an environment may take a minute; other leases must not wait."""
    if not token.is_set():
        threading.Thread(target=token.stop, args=(reason,), name="stop-attempt", daemon=True).start()
