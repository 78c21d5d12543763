"""Celery bootstep: the worker takes exactly one message and exits with code 0.

`max_tasks_per_child`, `WorkerShutdown` raised in the task and "stop when something has finished" all let a second
message in. This cancels every consumer in the moment in which the first message is reserved, remembers across
reconnects that it has, and leaves when the work is done, or when nothing came for a while.
"""

from __future__ import annotations

import time
from typing import Any

from celery import bootsteps
from celery.worker import state

_POLL_S = 0.05


class SingleTask(bootsteps.StartStopStep):  # type: ignore[misc]
    """One message per process life. `idle_s` and `leave` are set before the worker is built."""

    requires = ("celery.worker.consumer.tasks:Tasks",)
    idle_s: float = 30.0

    # Of the process, not of the step: a reconnect builds everything anew.
    taken: bool = False
    started_at: float | None = None

    def start(self, c: Any) -> None:
        """Called at every (re)connect."""
        cls = type(self)
        cls.started_at = cls.started_at or time.monotonic()
        if cls.taken:
            self._cancel(c)
        c.on_task_message.add(lambda _request: self._reserved(c))
        c.timer.call_repeatedly(_POLL_S, self._maybe_leave)

    def _reserved(self, c: Any) -> None:
        type(self).taken = True
        self._cancel(c)

    @staticmethod
    def _cancel(c: Any) -> None:
        for queue in list(c.task_consumer.queues):
            c.task_consumer.cancel_by_queue(queue.name)

    def _maybe_leave(self) -> None:
        cls = type(self)
        idle = not cls.taken and time.monotonic() - (cls.started_at or 0.0) > cls.idle_s
        if (cls.taken or idle) and not state.requests:
            state.should_stop = 0
