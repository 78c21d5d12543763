"""The control worker: a Celery worker on the control queue, with the dispatcher and the reconciler beside it.

    python -m app.workers.control

Any number may run: one dispatcher and one reconciler decide at a time.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from uuid import UUID

import structlog
from celery.worker.control import Panel

from app import instances as providers
from app import logs
from app.celery_app import CONTROL, app
from app.environments.sweeper import Sweeper
from app.errors import InstanceFailed, MegaFlowError
from app.instances.base import Provider
from app.ledger import instances
from app.ledger.attempts import RetryPolicy
from app.ledger.database import Database
from app.models.instance import InstanceRequest, queue_of
from app.models.spec import Mode
from app.scheduling.dispatcher import Dispatcher
from app.scheduling.reconciler import Hands, Reconciler
from app.settings import Settings, load
from app.workers import seat
from app.workers.evaluations import Calendar

log = structlog.get_logger()


class Control:
    """The control plane's threads, and the hands that they work with."""

    def __init__(self, settings: Settings) -> None:
        from app.tasks.attempt import publish  # tasks import workers; only this door looks up

        self._settings = settings
        self._database = Database(settings.database())
        self._retry = RetryPolicy(settings.retry_base_s, settings.retry_cap_s)
        self._stop = threading.Event()
        self._providers: dict[str, Provider] = {
            name: providers.provider_named(name, settings)
            for name in {settings.ephemeral_provider, settings.persistent_provider}
        }
        self._dispatcher = Dispatcher(self._database, settings, self._launch, partial(publish, app))
        hands = Hands(self._alive, self._terminate, Sweeper(settings).sweep)
        self._reconciler = Reconciler(self._database, settings, hands)

    def start(self) -> None:
        """Start the threads; ticks are served from here on."""
        seat.serve_ticks(Calendar(self._settings, self._database))
        self._thread("dispatcher", lambda: self._dispatcher.run(self._stop))
        self._thread("reconciler", lambda: self._reconciler.run(self._stop))
        watched = self._providers.get("docker")
        if watched is not None and hasattr(watched, "watch"):
            self._thread("docker-events", lambda: watched.watch(self._exited, self._stop))

    def stop(self) -> None:
        self._stop.set()

    def _thread(self, name: str, work: Callable[[], None]) -> None:
        def keep_working() -> None:
            while not self._stop.is_set():
                try:
                    work()
                except Exception:  # a control thread must come back, whatever it met
                    log.exception("control.thread_failed", thread=name)
                    self._stop.wait(1.0)

        threading.Thread(target=keep_working, name=name, daemon=True).start()

    def _launch(self, provider: str, requests: Sequence[InstanceRequest]) -> dict[UUID, str]:
        return self._providers[provider].launch(requests)

    def _alive(self) -> dict[str, dict[UUID, str]]:
        found: dict[str, dict[UUID, str]] = {}
        for name, provider in self._providers.items():
            try:
                found[name] = provider.alive()
            except InstanceFailed as error:
                log.warning("control.provider_silent", provider=name, error=str(error))
        return found

    def _terminate(self, provider: str, instance_id: UUID, handle: str) -> None:
        try:
            self._providers[provider].terminate(instance_id, handle, grace_s=0)
        except (InstanceFailed, KeyError) as error:
            log.warning("control.not_terminated", instance_id=str(instance_id), error=str(error))

    def _exited(self, instance_id: UUID, code: int | None, why: str) -> None:
        instances.exited(self._database, instance_id, code, why, self._retry)


def _queues(_: Any, **__: Any) -> list[dict[str, str]]:
    """The control worker's answer to Celery's inspection `active_queues`: its own queue, and those that it feeds.

    Flower learns its list of queues from these answers alone, and ephemeral workers, without remote control, give none.
    """
    fed = [queue_of(mode, "standard") for mode in (Mode.EPHEMERAL, Mode.PERSISTENT)]
    return [{"name": name} for name in (CONTROL, *fed)]


def main() -> int:
    """Work until told to stop."""
    Panel.register(name="active_queues", type="inspect")(_queues)
    settings = load()
    logs.configure(settings.log_level)
    control = Control(settings)
    worker = app.Worker(
        hostname=f"control@{socket.gethostname()}",
        queues=[CONTROL],
        pool="threads",
        concurrency=2,
        without_gossip=True,
        without_mingle=True,
        loglevel=settings.log_level,
    )
    control.start()
    try:
        worker.start()
    finally:
        control.stop()
    return int(worker.exitcode or 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MegaFlowError as error:
        sys.exit(f"control: {error}")
