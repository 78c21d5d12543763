"""Runs an instance: starts its Celery worker from the provider's request; ends when the worker exits.

python -m app.workers.instance '{"instance_id": "…", "mode": "persistent", "slots": 4}'
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from typing import Any
from uuid import UUID

import structlog
from celery import Celery, bootsteps, signals
from celery.worker import state
from uuid_utils import compat as uuids

from app import logs
from app.errors import MegaFlowError
from app.ledger import connections, host_images, hosts, instances
from app.ledger.database import Database
from app.ledger.instances import INTERRUPTED_EXIT
from app.models.endings import RetryPolicy
from app.models.instance import MARK, InstanceMode, InstanceRequest
from app.scheduling.placement import queue_at
from app.settings import Settings, load
from app.workers import context, host_care, services
from app.workers.context import WorkerContext
from app.workers.lease import LeaseRenewer

log = structlog.get_logger()

_POLL_S = 0.05


class _DrainCheck(bootsteps.StartStopStep):  # type: ignore[misc]
    """Exits when the ledger has closed the instance's row. When draining, takes no new work and exits when done."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, c: Any) -> None:
        c.timer.call_repeatedly(0.5, lambda: self._check(c))

    @staticmethod
    def _check(c: Any) -> None:
        renewer = context.current().renewer
        if renewer.orphaned.is_set():
            state.should_stop = 0
        elif renewer.draining.is_set():
            _cancel_queues(c)
            if not state.requests and not renewer.busy():
                state.should_stop = 0


def _cancel_queues(c: Any) -> None:
    for queue in list(c.task_consumer.queues):
        c.task_consumer.cancel_by_queue(queue.name)


class SingleTask(bootsteps.StartStopStep):  # type: ignore[misc]
    """The worker takes exactly one message and exits with code 0. Set `idle_s` before the worker is built.

    `max_tasks_per_child`, `WorkerShutdown` raised in the task and "stop when something has finished" all let a second
    message in. This step cancels every consumer at the moment the first message is reserved, and remembers this across
    reconnects. It exits when the work is done, or when no message came for `idle_s` seconds.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)
    idle_s: float = 30.0

    # Class attributes, one per process: a reconnect builds a new step.
    taken: bool = False
    started_at: float | None = None

    def start(self, c: Any) -> None:
        """Called at every (re)connect."""
        cls = type(self)
        cls.started_at = cls.started_at or time.monotonic()
        if cls.taken:
            _cancel_queues(c)
        c.on_task_message.add(lambda _request: self._reserved(c))
        c.timer.call_repeatedly(_POLL_S, self._maybe_leave)

    def _reserved(self, c: Any) -> None:
        type(self).taken = True
        _cancel_queues(c)

    def _maybe_leave(self) -> None:
        cls = type(self)
        idle = not cls.taken and time.monotonic() - (cls.started_at or 0.0) > cls.idle_s
        if (cls.taken or idle) and not state.requests:
            state.should_stop = 0


def host(celery: Celery, request: InstanceRequest, settings: Settings) -> int:
    """Works as this instance until it must exit; returns the process's exit code."""
    os.environ[MARK] = str(request.instance_id)
    ephemeral = request.mode is InstanceMode.EPHEMERAL
    built = services.build(settings, pooled=not ephemeral, max_idle=0 if ephemeral else request.slots)
    here = WorkerContext(request.instance_id, built, LeaseRenewer(built.database, settings, request.instance_id))
    context.sit(here)
    here.renewer.start()
    _connect_signals(here, settings, placed=not ephemeral)
    worker = _worker(celery, request, settings)
    try:
        with ExitStack() as beside:
            if not ephemeral:
                beside.enter_context(host_care.caring(settings, built.database))
            worker.start()
    finally:
        here.renewer.close()
        built.close()
    return INTERRUPTED_EXIT if here.shutting_down.is_set() else int(worker.exitcode or 0)


def _worker(celery: Celery, request: InstanceRequest, settings: Settings) -> Any:
    ephemeral = request.mode is InstanceMode.EPHEMERAL
    placed = request.mode is InstanceMode.PERSISTENT
    celery.steps["consumer"].add(_DrainCheck)
    if ephemeral:
        SingleTask.idle_s = settings.ephemeral_idle_s
        celery.steps["consumer"].add(SingleTask)
    if ephemeral or settings.joined:  # in Redis, read access to worker commands means write access: not for hosts
        celery.conf.worker_enable_remote_control = False
    return celery.Worker(
        hostname=f"{request.mode.value}-{str(request.instance_id)[-12:]}@{settings.host()}",
        queues=[queue_at(request.queue, settings.host()), request.queue] if placed else [request.queue],
        pool="threads",
        concurrency=request.slots,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=ephemeral,
        loglevel=settings.log_level,
    )


def _connect_signals(here: WorkerContext, settings: Settings, *, placed: bool) -> None:
    """Connects the worker's signals: ready; shutdown: finish within `drain_s`, else interrupt all work.

    placed: the instance is persistent; its host is recorded.
    """

    def on_ready(**_: Any) -> None:
        if placed:
            host_images.stands_on(here.services.database, here.instance_id, settings.host())
        if not instances.ready(here.services.database, here.instance_id):
            log.warning("instance.not_expected", instance_id=str(here.instance_id))
            state.should_stop = 0

    def on_shutdown(**_: Any) -> None:
        timer = threading.Timer(settings.drain_s, here.interrupt)  # even if nothing is held: a claim may be in progress
        timer.daemon = True
        timer.start()

    signals.worker_ready.connect(on_ready, weak=False)
    signals.worker_shutting_down.connect(on_shutdown, weak=False)


def main(argument: str, *, alone: bool = False) -> int:
    """Hosts the instance that the JSON in `argument` describes.

    alone: the machine runs only this; its provider sees no exit codes, so this process records its own end.
    """
    from app.celery_app import app

    logs.configure(load().log_level)
    request = InstanceRequest.model_validate_json(argument)
    code = host(app, request, load())
    if alone:
        _tell_end(Database(load().database(), pooled=False), request.instance_id, code, load())
    return code


def _tell_end(database: Database, instance_id: UUID, code: int, settings: Settings) -> None:
    retry = RetryPolicy(settings.retry_base_s, settings.retry_cap_s)
    instances.exited(database, instance_id, code, "it left", retry)


def stand(mode: InstanceMode, slots: int, resource_class: str = "standard") -> int:
    """Hosts a standing instance without a provider (a compose service): it registers itself."""
    from app.celery_app import app

    settings = load()
    instance_id: UUID = uuids.uuid7()
    request = InstanceRequest(instance_id=instance_id, mode=mode, resource_class=resource_class, slots=slots)
    database = Database(settings.database(), pooled=False)
    handle = f"{settings.host()}:{os.getpid()}"
    instances.register(
        database, instance_id, mode=mode, resource_class=request.resource_class, slots=slots, handle=handle
    )
    with connections.connected(database, instance_id, silent_s=settings.lease_s):
        code = host(app, request, settings)
    _tell_end(database, instance_id, code, settings)
    if settings.joined and instances.draining_why(database, instance_id) != hosts.LEAVES:
        return code or INTERRUPTED_EXIT  # supervisord restarts it
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        sys.exit(main(sys.argv[1], alone="alone" in sys.argv[2:]))
    except MegaFlowError as error:
        sys.exit(f"instance: {error}")
