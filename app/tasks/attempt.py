"""Defines the tasks `attempt.run` and `grading.run`, the only ones of instances. Their body is the wake-up message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery import Celery, shared_task
from kombu.pools import producers

from app.ledger.admission import QueuedMessage
from app.models.endings import BLAME, Blame
from app.models.instance import InstanceMode, queue_of
from app.models.outcome import WakeUpMessage
from app.scheduling.placement import queue_at
from app.workers import context

_NOT_SCORED = {reason.value for reason, blame in BLAME.items() if blame is Blame.INFRASTRUCTURE}
_ABOUT_CHARS = 300
_PATIENCE = {"socket_timeout": 5, "socket_connect_timeout": 5}
"""Timeouts in seconds of the connection that publishes; a worker's connection, which waits for messages, has others.
While a broker is silent the dispatcher must not block: it sends again later."""


class AttemptNotScored(Exception):
    """The attempt ended because of the infrastructure. Celery and Flower count it as a failure."""


@shared_task(name="attempt.run", throws=(AttemptNotScored,))
def run(**message: Any) -> str:
    """Runs the attempt of the message, if it is still to be run; returns a line for Flower.

    Raises: AttemptNotScored: with the end reason.
    """
    return _ended(context.current().take(WakeUpMessage.model_validate(message)))


@shared_task(name="grading.run", throws=(AttemptNotScored,))
def grade(**message: Any) -> str:
    """Grades the attempt of the message, if it is still to be graded; returns a line for Flower.

    Raises: AttemptNotScored: with the end reason.
    """
    return _ended(context.current().grade(WakeUpMessage.model_validate(message)))


def _ended(ended: str) -> str:
    """Raises: AttemptNotScored."""
    if ended in _NOT_SCORED:
        raise AttemptNotScored(ended)
    return ended


def publish(celery: Celery, items: Sequence[QueuedMessage]) -> None:
    """Puts messages into the queues of their mode and class, or of their host, over one connection, in batches.

    Raises: any error of the transport when the broker is unreachable, or silent for some seconds; some messages may
        have been sent.
    """
    with (
        celery.connection_for_write(transport_options=_PATIENCE) as connection,
        producers[connection].acquire(block=True) as producer,
        producer.batch(),
    ):
        declared: set[str] = set()
        for item in items:
            queue = _queue(item)
            task, of = (grade, "-grading") if item.mode is InstanceMode.GRADING else (run, "")
            task.apply_async(
                kwargs=item.message.model_dump(mode="json"),
                argsrepr="",
                kwargsrepr=item.about[:_ABOUT_CHARS],
                queue=queue,
                declare=[] if queue in declared else None,  # once is enough: a declaration costs a fifth of a message
                task_id=f"{item.message.attempt_id}{of}",
                producer=producer,
                retry=False,
            )
            declared.add(queue)


def _queue(item: QueuedMessage) -> str:
    common = queue_of(item.mode, item.resource_class)
    return common if item.host is None else queue_at(common, item.host)
