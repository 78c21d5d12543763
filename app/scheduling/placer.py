"""Places the dispatcher's tasks by image, with data cached between passes.

Used only while a class has standing instances on several hosts: on a single machine nothing is read.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from app.ledger import host_images
from app.ledger.host_images import ImageKey, ImagesOfTasks
from app.ledger.waiting import QueueKey
from app.models.spec import Mode
from app.scheduling import placement
from app.scheduling.placement import Contender
from app.scheduling.policy import TaskQueue

_EXPECTED_S = 300.0
"""Time for which a host that got a task counts as having its image without a report: it may be pulling it."""
_MOST_REMEMBERED = 20_000


class Head(NamedTuple):
    """A task near the head of a queue. Tasks of one `turn` differ only in arrival."""

    task_id: UUID
    turn: Any


class Placer:
    """Placer of a dispatcher. `image_key`: returns the hosts' name of an image; None: no placement."""

    def __init__(self, image_key: ImageKey | None) -> None:
        self._images = None if image_key is None else ImagesOfTasks(image_key)
        self._overtaken: dict[UUID, int] = {}
        self._expected: dict[tuple[str, str], float] = {}  # image and host: expiry in monotonic seconds

    def looks_behind(self, key: QueueKey, spread: Collection[str], queues: int) -> int:
        """Returns how many tasks of this queue to read in addition to those that may go."""
        if self._images is None or key.mode is Mode.EPHEMERAL or key.resource_class not in spread:
            return 0
        return min(placement.LOOK_AHEAD, max(4, 4 * placement.LOOK_AHEAD // queues))  # divided among queues

    def place(
        self,
        connection: Connection,
        spread: Collection[str],
        queues: Sequence[tuple[TaskQueue, Sequence[Head]]],
        chosen: Sequence[tuple[UUID, Mode]],
        withheld: Mapping[tuple[str, str], int],
    ) -> tuple[list[tuple[UUID, Mode]], dict[UUID, str]]:
        """Returns the choice with tasks of one turn exchanged for each other, and the tasks' hosts.

        queues: each with its heads (tasks that may go and tasks behind them). withheld: slots that must stay free, by
        host and class.
        """
        if self._images is None or not spread:
            return list(chosen), {}
        modes = dict(chosen)
        exchanged: dict[UUID, UUID] = {}
        hosts: dict[UUID, str] = {}
        for name in spread:
            heads = {head.task_id: head for queue, first in queues if queue.resource_class == name for head in first}
            going = [heads[i] for i, mode in chosen if i in heads and mode is Mode.PERSISTENT]
            if going:
                turns = {head.turn for head in going}
                behind = [head for head in heads.values() if head.task_id not in modes and head.turn in turns]
                free = host_images.free_slots(connection, name)
                free = {host: slots - withheld.get((host, name), 0) for host, slots in free.items()}
                went = self._place(connection, free, going, behind)
                exchanged |= {head.task_id: task_id for head, (task_id, _) in zip(going, went, strict=True)}
                hosts |= {task_id: host for task_id, host in went if host is not None}
        return [(exchanged.get(task_id, task_id), mode) for task_id, mode in chosen], hosts

    def _place(
        self, connection: Connection, free: Mapping[str, int], going: Sequence[Head], behind: Sequence[Head]
    ) -> list[tuple[UUID, str | None]]:
        assert self._images is not None
        images = self._images.of(connection, [head.task_id for head in (*going, *behind)])
        needed = {image for image in images.values() if image}
        choice = placement.place(
            [Contender(head.task_id, head.turn, images.get(head.task_id, "")) for head in going],
            [Contender(head.task_id, head.turn, images.get(head.task_id, "")) for head in behind],
            free,
            self._where(connection, needed),
            self._overtaken,
        )
        self._remember(choice, images)
        return choice.chosen

    def _where(self, connection: Connection, images: set[str]) -> Mapping[str, Collection[str]]:
        """Returns by image the hosts that have it or got a task that needs it."""
        hosts_by_image: defaultdict[str, set[str]] = defaultdict(set)
        for image, hosts in host_images.where(connection, images).items():
            hosts_by_image[image] |= hosts
        now = time.monotonic()
        for (image, host), until in list(self._expected.items()):
            if until < now:
                del self._expected[image, host]
            elif image in images:
                hosts_by_image[image].add(host)
        return hosts_by_image

    def _remember(self, made: placement.PlacementChoice, images: Mapping[UUID, str]) -> None:
        if len(self._overtaken) > _MOST_REMEMBERED:  # mostly cancelled tasks
            self._overtaken.clear()
        self._overtaken.update(made.overtaken)
        for task_id, host in made.chosen:
            self._overtaken.pop(task_id, None)
            if host is not None and images.get(task_id):
                self._expected[images[task_id], host] = time.monotonic() + _EXPECTED_S

    def forget(self) -> None:
        """Clears the cache: another dispatcher has decided in the meantime."""
        self._overtaken.clear()
        self._expected.clear()
