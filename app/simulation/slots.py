"""Assigns messages to simulated instances with a free slot."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from celery import Celery

from app.models.outcome import WakeUpMessage
from app.simulation.instances import Instance
from app.simulation.wakeups import WakeUpListener

SlotAssignment = tuple[Instance, WakeUpMessage]
Deliver = Callable[[str, Sequence[WakeUpMessage]], object]
"""Callback with queue and messages; called on a listener's thread."""


class SlotTable:
    """Free slots by queue, and a listener for each queue that ever had a slot. Used on the fleet's thread.

    A listener takes messages while slots are free. If a message's slot disappears, it waits for the next free slot.
    """

    def __init__(self, celery: Celery, deliver: Deliver) -> None:
        self._celery = celery
        self._deliver = deliver
        self._free: defaultdict[str, deque[Instance]] = defaultdict(deque)  # an entry per free slot; some are outdated
        self._held: defaultdict[str, deque[WakeUpMessage]] = defaultdict(deque)
        self._ears: dict[str, WakeUpListener] = {}

    def open(self, instance: Instance, count: int) -> list[SlotAssignment]:
        """Adds free slots; returns the held messages with the slots that they get."""
        queue = instance.request.queue
        instance.free += count
        self._free[queue].extend([instance] * count)
        self._ear(queue).slots(count)
        held = self._held[queue]
        waited = []
        while held and (instance_with_slot := self._take(queue)) is not None:
            waited.append((instance_with_slot, held.popleft()))
        return waited

    def shut(self, instance: Instance) -> None:
        """Closes the free slots of an instance: it takes nothing new."""
        if instance.free:
            self._ear(instance.request.queue).slots(-instance.free)
            instance.free = 0

    def assign(self, queue: str, messages: Sequence[WakeUpMessage]) -> list[SlotAssignment]:
        """Assigns free slots to messages; holds messages without a slot."""
        assigned = []
        for message in messages:
            instance = self._take(queue)
            if instance is None:
                self._held[queue].append(message)
            else:
                assigned.append((instance, message))
        return assigned

    def close(self) -> None:
        for ear in self._ears.values():
            ear.close()

    def _take(self, queue: str) -> Instance | None:
        slots = self._free[queue]
        while slots:
            instance = slots.popleft()
            if instance.free:  # else it was shut in the meantime
                instance.free -= 1
                return instance
        return None

    def _ear(self, queue: str) -> WakeUpListener:
        if queue not in self._ears:
            self._ears[queue] = WakeUpListener(self._celery, queue, self._deliver)
        return self._ears[queue]
