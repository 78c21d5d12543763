"""Acquires an attempt's semaphores in the ledger, shared by all hosts, shown by `megaflow limits`.

If a worker dies, its places are freed with the attempt, the instance or the lease, whichever end is noticed first.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from uuid import UUID

import structlog
from sqlalchemy.exc import DBAPIError
from uuid_utils import compat as uuids

from app.errors import DatabaseUnavailable
from app.ledger import semaphores
from app.ledger.database import Database, Listener
from app.ledger.limits import HOLDS, everybody
from app.ledger.semaphores import SemaphoreAnswer

log = structlog.get_logger()

_LISTENERS = 4
"""Number of waiters at the head of the queue that keep a connection for wake-ups; the others poll."""
_LOOK_S = 0.5
"""Polling interval at the head of the queue. Expired leases send no notification, so poll."""
_STEP_S = 0.05
"""Polling interval of other waiters, per waiter ahead of them, up to a second in total."""

_NOTED_S = 0.1
"""A shorter time is the duration of the query and does not count as a wait."""


class LedgerSemaphore:
    """Implements the environments' `Semaphore` for one attempt, used by the attempt's thread only. Also for work
    without an attempt: then this class renews its places.

    `waited`: seconds waited so far by limit, for `attempts.waits`; places granted at once are not counted.
    `stopped`: whether the attempt must stop.
    """

    def __init__(
        self,
        database: Database,
        *,
        lease_s: float,
        attempt_id: UUID | None = None,
        instance_id: UUID | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._database = database
        self._attempt_id = attempt_id
        self._instance_id = instance_id
        self._lease_s = lease_s
        self._stopped = stopped
        self.waited: dict[str, float] = {}

    @contextmanager
    def hold(self, limit: str, capacity: int | None, *, timeout_s: float) -> Iterator[None]:
        """Holds a place at `limit` for the block.

        Raises: TimeoutError: no place was free in time, or the attempt must stop; DatabaseUnavailable: no answer for
        the duration of a lease.
        """
        holder = uuids.uuid7()
        begun = time.monotonic()
        wait = _Wait(self._ask(limit, capacity, holder), limit, self._database, self._stopped)
        try:
            try:
                wait.until(begun + timeout_s, patience_s=self._lease_s)
            finally:
                self._note(limit, time.monotonic() - begun)
            with nullcontext() if self._attempt_id is not None else self._renewed(holder):
                yield
        finally:
            self._leave(limit, holder)

    @contextmanager
    def _renewed(self, holder: UUID) -> Iterator[None]:
        """Renews the place during the block, as the renewal of a lease does for an attempt's places."""
        ended = threading.Event()

        def renew() -> None:
            while not ended.wait(self._lease_s / 3):
                with suppress(DatabaseUnavailable, DBAPIError):
                    semaphores.renew(self._database, [holder], lease_s=self._lease_s)

        threading.Thread(target=renew, name="semaphore-renewal", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _note(self, limit: str, seconds: float) -> None:
        if seconds >= _NOTED_S:
            self.waited[limit] = self.waited.get(limit, 0.0) + seconds

    def _ask(self, limit: str, capacity: int | None, holder: UUID) -> Callable[[], SemaphoreAnswer]:
        return lambda: semaphores.ask(
            self._database,
            limit,
            holder,
            capacity_default=capacity,
            lease_s=self._lease_s,
            attempt_id=self._attempt_id,
            instance_id=self._instance_id,
        )

    def _leave(self, limit: str, holder: UUID) -> None:
        try:
            semaphores.release(self._database, limit, holder)
        except (DatabaseUnavailable, DBAPIError) as error:  # the place lapses, or is freed with the attempt
            log.warning("hold.not_released", limit=limit, error=str(error))


class _Wait:
    def __init__(
        self, ask: Callable[[], SemaphoreAnswer], limit: str, database: Database, stopped: Callable[[], bool]
    ) -> None:
        self._ask = ask
        self._limit = limit
        self._wakes = {limit, everybody(limit)}
        self._database = database
        self._stopped = stopped
        self._listener: Listener | None = None

    def until(self, deadline: float, *, patience_s: float) -> None:
        answered = time.monotonic()
        with ExitStack() as closing:
            closing.callback(self._deaf)
            while True:
                try:
                    if not self._turn():
                        return
                    answered = time.monotonic()
                except (DatabaseUnavailable, DBAPIError) as error:
                    self._deaf()
                    if time.monotonic() - answered > patience_s:
                        raise _unavailable(error) from error
                    time.sleep(random.uniform(0.1, 0.5))
                self._raise_if_over(deadline)

    def _turn(self) -> bool:
        """Asks for the place; if not granted, waits a little and returns True. False: granted."""
        answer = self._ask()
        if answer.granted:
            return False
        if answer.ahead >= _LISTENERS:
            self._deaf()
            time.sleep(min(1.0, _STEP_S * answer.ahead) * random.uniform(0.8, 1.2))
        else:
            self._listen()
        return True

    def _listen(self) -> None:
        """Waits until a place may be free. A new listener returns at once: it missed earlier notifications."""
        if self._listener is None:
            self._listener = Listener(self._database, HOLDS)
        until = time.monotonic() + _LOOK_S
        while (left_s := until - time.monotonic()) > 0:
            heard = self._listener.wait(left_s)
            if heard is None or self._wakes.intersection(heard):
                return

    def _raise_if_over(self, deadline: float) -> None:
        if self._stopped():
            raise TimeoutError(f"told to stop while it waited for {self._limit}")
        if time.monotonic() >= deadline:
            raise TimeoutError(f"no place at {self._limit} was free in time (`megaflow limits` shows who has them)")

    def _deaf(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def _unavailable(error: Exception) -> DatabaseUnavailable:
    if isinstance(error, DatabaseUnavailable):
        return error
    return DatabaseUnavailable(f"the ledger did not give a place: {error}; try `megaflow doctor`")
