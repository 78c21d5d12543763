"""Keeps environments ready on one host: sized by the queue, made ahead, handed out, given back when cold."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from uuid import uuid4

import structlog

from app.environments.host_slots import turn
from app.environments.warm import wire
from app.environments.warm.ahead import Provide, Wish, Workshop, lives, put_off
from app.environments.warm.door import Door
from app.environments.warm.key import may_be_ready
from app.environments.warm.policy import Plan, plan
from app.environments.warm.shelf import Ready, Shelf
from app.errors import DatabaseUnavailable, StationError

log = structlog.get_logger()

MOST = 8
"""Environments that a host keeps ready, unless it is told otherwise."""
GRACE_S = 60.0
"""What no task in sight needs is kept for so long: the next run may be on its way."""
_LOOK_S = 1.0
_REST_S = 0.5
"""Between two looks at the queue at the least, however often it changes."""
_STOP_S = 0.1
"""It is told to stop by an event that wakes nobody, so it looks."""
_AWAY_S = 10.0
"""Between two tries while another process of this host does the work."""
_RENEW_S = 30.0
"""Between two renewals of what is ready; a fraction of its life."""
_MAKERS = 4
"""Environments made ahead at once: on a host of few cores more would only take from the tasks that run."""
_CLOSING_S = 5.0
_NEAR = 4
"""Images are asked for as far down the queue as this many times what is kept: one far off need not be here yet."""

Queue = Callable[[], Sequence[Wish]]
"""What the tasks will need, soonest first: an entry for each environment. Raises: DatabaseUnavailable."""


class Keeper:
    """Keeps up to `most` environments ready for the processes that share `home`; `run` blocks until told to stop.

    provide: makes providers whose gate takes places of the fleet; the keeper's own must not be waited for
    (`AheadGate`). Belongs into a process that does not fork.
    """

    def __init__(
        self,
        home: Path,
        installation: str,
        *,
        queue: Queue,
        provide: Provide,
        most: int = MOST,
        grace_s: float = GRACE_S,
        makers: int = _MAKERS,
    ) -> None:
        self._alone = home / "run" / "slots" / "warm"
        self._address = wire.address(home)
        self._installation = installation
        self._queue = queue
        self._provide = provide
        self._most = most
        self._grace_s = grace_s
        self._makers = makers
        self._shift: Shift | None = None

    def wake(self) -> None:
        """The queue has changed: look at it soon. Safe to call from anywhere, as often as it changes."""
        if (shift := self._shift) is not None:
            shift.hurry()

    def ready(self) -> int:
        """How many environments wait for a task now."""
        return 0 if (shift := self._shift) is None else shift.shelf.stock()[0].total()

    def run(self, stop: threading.Event) -> None:
        """Work while no other process of this host does; what is ready is given back before it returns."""
        while self._most > 0 and not stop.is_set():
            try:
                with ExitStack() as held:
                    if self._is_alone(held):
                        self._work(stop)
                        continue
            except OSError as error:  # the socket
                log.warning("warm.no_door", reason=str(error))
            stop.wait(_AWAY_S)

    def _is_alone(self, held: ExitStack) -> bool:
        """Whether the host is ours for as long as `held` is."""
        try:
            held.enter_context(turn(self._alone, timeout_s=0.0))
        except TimeoutError:
            return False
        return True

    def _work(self, stop: threading.Event) -> None:
        shift = Shift(self._queue, self._provide, self._installation, self._most, self._grace_s, self._makers)
        taken, lost = shift.taken, shift.lost
        door = Door(self._address, shift.shelf, installation=self._installation, taken=taken, lost=lost)
        self._shift = shift
        renewing = threading.Thread(target=shift.renew, name="warm-renewal", daemon=True)
        try:
            door.open()
            renewing.start()
            while not stop.is_set():
                shift.look()
                shift.rest(stop)
        finally:
            self._shift = None
            door.close()
            shift.close()


class Shift:
    """One keeper's work from the moment that it has the host for itself."""

    def __init__(
        self, queue: Queue, provide: Provide, installation: str, most: int, grace_s: float, makers: int
    ) -> None:
        self.shelf = Shelf()
        self._queue = queue
        self._most = most
        self._grace_s = grace_s
        self._news = threading.Event()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._wishes: Sequence[Wish] = ()
        self._gone: Counter[str] = Counter()  # taken since the queue was read
        self._read_next = self._read_last = 0.0  # monotonic
        self._surplus_since: dict[str, float] = {}
        self._workshop = Workshop(
            self.shelf,
            provide,
            installation=installation,
            keeper_id=uuid4(),
            makers=makers,
            changed=self._news.set,
        )

    def taken(self, key: str) -> None:
        """Somebody has one of these: what it was kept for needs it no more."""
        with self._lock:
            self._gone[key] += 1
        self._news.set()

    def lost(self, key: str, one: Ready, alive: bool) -> None:
        """This one could not be given away. One that lives is of a kind that never can: no more of them."""
        if alive:
            self._workshop.leave(key)
        self._workshop.end_soon(one)

    def hurry(self) -> None:
        """Read the queue as soon as it is not too soon after the last time."""
        self._read_next = min(self._read_next, self._read_last + _REST_S)
        self._news.set()

    def rest(self, stop: threading.Event) -> None:
        """Until something has changed, or the queue may have."""
        while (left_s := self._read_next - time.monotonic()) > 0 and not stop.is_set():
            if self._news.wait(min(left_s, _STOP_S)):
                self._news.clear()
                return

    def look(self) -> None:
        """Read the queue when it is time, give back what is cold, begin what is missing."""
        self._read()
        wanted = self._wanted()
        next_steps = self._plan([key for key, _ in wanted])
        for key in next_steps.give_back:
            if (one := self.shelf.take(key)) is not None:
                log.info("warm.given_back", environment=one.environment.id, image=one.spec.label)
                self._workshop.end_soon(one)
        wishes = dict(reversed(wanted))  # the soonest of each key
        for key in next_steps.make:
            if self._has_room() and self._workshop.may_make(key):
                self._workshop.make(key, wishes[key])

    def _has_room(self) -> bool:
        """What is being ended takes its place until it has ended."""
        ready, making = self.shelf.stock()
        return ready.total() + making.total() + self._workshop.ending < self._most

    def _read(self) -> None:
        if time.monotonic() < self._read_next:
            return
        with self._lock:
            self._gone.clear()
        try:
            found = [wish for wish in self._queue() if may_be_ready(wish.spec)]
        except DatabaseUnavailable as error:
            log.debug("warm.queue_not_read", reason=str(error))
        else:
            self._wishes = found
            self._workshop.forget()
        self._read_last = time.monotonic()
        self._read_next = self._read_last + _LOOK_S

    def _wanted(self) -> list[tuple[str, Wish]]:
        """What is needed, by key, without what has been taken since; of images that are here."""
        with self._lock:
            gone = Counter(self._gone)
        found: list[tuple[str, Wish]] = []
        for place, wish in enumerate(self._wishes):
            near = len(found) < self._most and place < _NEAR * self._most
            key = self._workshop.key_of(wish, look=near)
            if key is None:
                continue
            if gone[key]:
                gone[key] -= 1
            else:
                found.append((key, wish))
        return found

    def _plan(self, needs: list[str]) -> Plan[str]:
        now = time.monotonic()
        overdue = {key for key, since in self._surplus_since.items() if now - since >= self._grace_s}
        ready, making = self.shelf.stock()
        found = plan(needs, ready, making, most=self._most, overdue=overdue)
        self._surplus_since = {key: self._surplus_since.get(key, now) for key in found.surplus}
        return found

    def renew(self) -> None:
        """Put off the deadlines of what is ready, and drop what has died, until the shift is over."""
        while not self._over.wait(_RENEW_S):
            for one in self.shelf.all():
                with one.turn:
                    dead = self.shelf.holds(one) and not _renewed(one)
                if dead and self.shelf.drop(one):
                    self._workshop.end_soon(one)

    def close(self) -> None:
        """Give everything back; what is still being made ends when it is made, or with this process."""
        self._over.set()
        for one in self.shelf.close():
            self._workshop.end_soon(one)
        give_up = time.monotonic() + _CLOSING_S
        while (self.shelf.stock()[1] or self._workshop.ending) and time.monotonic() < give_up:
            time.sleep(0.01)


def _renewed(one: Ready) -> bool:
    """False: it does not live, or cannot be told to."""
    with suppress(StationError):
        put_off(one.environment)
        if lives(one):
            return True
    log.warning("warm.died", environment=one.environment.id, image=one.spec.label)
    return False
