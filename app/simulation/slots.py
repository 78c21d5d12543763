"""Which simulated instance has a free seat, and which hint gets it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from celery import Celery

from app.models.outcome import WakeUpMessage
from app.simulation.instances import Instance
from app.simulation.wakeups import HintEar

Seated = tuple[Instance, WakeUpMessage]
Deliver = Callable[[str, Sequence[WakeUpMessage]], None]
"""Queue and hints; called on an ear's own thread."""


class Seats:
    """Free seats by queue, and an ear for each queue that ever had one. Used on the world's thread.

    An ear takes hints while seats are free. A seat that goes while its hint is on the way leaves the hint without one:
    it is held until the next is free.
    """

    def __init__(self, celery: Celery, deliver: Deliver) -> None:
        self._celery = celery
        self._deliver = deliver
        self._free: defaultdict[str, deque[Instance]] = defaultdict(deque)  # an entry per seat; some are outdated
        self._held: defaultdict[str, deque[WakeUpMessage]] = defaultdict(deque)
        self._ears: dict[str, HintEar] = {}

    def open(self, instance: Instance, count: int) -> list[Seated]:
        """So many seats are free now; what was held, with the seats that it gets."""
        queue = instance.request.queue
        instance.free += count
        self._free[queue].extend([instance] * count)
        self._ear(queue).seats(count)
        held = self._held[queue]
        waited = []
        while held and (found := self._take(queue)) is not None:
            waited.append((found, held.popleft()))
        return waited

    def shut(self, instance: Instance) -> None:
        """It takes nothing new."""
        if instance.free:
            self._ear(instance.request.queue).seats(-instance.free)
            instance.free = 0

    def seat(self, queue: str, hints: Sequence[WakeUpMessage]) -> list[Seated]:
        """A seat for each hint, as far as there are any."""
        seated = []
        for hint in hints:
            found = self._take(queue)
            if found is None:
                self._held[queue].append(hint)
            else:
                seated.append((found, hint))
        return seated

    def close(self) -> None:
        for ear in self._ears.values():
            ear.close()

    def _take(self, queue: str) -> Instance | None:
        seats = self._free[queue]
        while seats:
            instance = seats.popleft()
            if instance.free:  # else it was shut since
                instance.free -= 1
                return instance
        return None

    def _ear(self, queue: str) -> HintEar:
        if queue not in self._ears:
            self._ears[queue] = HintEar(self._celery, queue, self._deliver)
        return self._ears[queue]
