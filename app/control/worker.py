"""The control worker: a Celery worker on the control queue that also runs the dispatcher and the reconciler.

    python -m app.control.worker

Any number may run: one dispatcher and one reconciler decide at a time.
"""

from __future__ import annotations

import gc
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any
from uuid import UUID

import structlog
from celery.worker.control import Panel

from app import instances as providers
from app import logs
from app.artifacts import open_store
from app.celery_app import CONTROL, app
from app.control import metrics
from app.control.calendar import Calendar
from app.control.transcripts import TranscriptChecks
from app.control.webhooks import Webhooks
from app.errors import DatabaseUnavailable, InstanceFailed, MegaFlowError, UnknownName
from app.experience.maker import SampleMaker
from app.images.references import key_of
from app.instances import joining
from app.instances.base import Provider, QueueingProvider, WarnedProvider, WatchedProvider
from app.instances.prices import prices_of
from app.ledger import classes, host_images, instances
from app.ledger.classes import ResourceClass
from app.ledger.database import Database
from app.models.endings import RetryPolicy
from app.models.instance import InstanceMode, InstanceRequest, queue_of
from app.scheduling.auditor import Auditor
from app.scheduling.dispatcher import Dispatcher
from app.scheduling.placement import queue_at
from app.scheduling.reconciler import Hands, Reconciler
from app.settings import Settings, load
from app.stopping import nudge
from app.workers import context, host_care, host_sweep

log = structlog.get_logger()


class Control:
    """The control plane's threads, and the functions through which they act."""

    def __init__(self, settings: Settings) -> None:
        from app.tasks.attempt import publish  # not at the top: app.tasks imports workers

        self._settings = settings
        self._database = Database(settings.database())
        self._retry = RetryPolicy(settings.retry_base_s, settings.retry_cap_s)
        self._stop = threading.Event()
        self._started = False
        self._beside = ExitStack()
        self._providers: dict[str, Provider] = {
            name: providers.provider_named(name, settings) for name in self._names()
        }
        send = partial(publish, app)
        self._dispatcher = Dispatcher(self._database, settings, self._launch, send, key_of, prices_of(settings))
        lead_here = partial(host_sweep.lead_here, settings)
        hands = Hands(self._alive, self._terminate, lead_here, partial(nudge, settings), self._run_times)
        self._reconciler = Reconciler(self._database, settings, hands)
        self._transcripts = TranscriptChecks(settings, self._database)
        self._auditor = Auditor(self._database, settings, self._transcripts.add)
        self._webhooks = Webhooks(self._database, settings)
        store = open_store(settings.artifacts(), endpoint_url=settings.s3_endpoint_url)
        self._samples = SampleMaker(self._database, store, partial(nudge, settings))

    def _resource_classes(self) -> list[ResourceClass]:
        """Returns the resource classes; none while the database is unavailable."""
        try:
            with self._database.begin() as connection:
                return list(classes.load(connection, self._settings).values())
        except DatabaseUnavailable:
            return []

    def _names(self) -> set[str]:
        """Returns the names of the providers in the settings and in resource classes."""
        chosen: set[str] = {self._settings.ephemeral_provider, self._settings.persistent_provider}
        return chosen.union(*({o.ephemeral_provider, o.persistent_provider} for o in self._resource_classes()))

    def queues(self, *_: Any, **__: Any) -> list[dict[str, str]]:
        """Answers Celery's inspection `active_queues`: the control queue, and the queues that are filled from here.

        Flower takes its list of queues only from these answers. Ephemeral workers, without remote control, give none.
        """
        names = [offer.name for offer in self._resource_classes()] or ["standard"]
        fed = [queue_of(mode, name) for name in names for mode in InstanceMode]
        placed = [
            queue_at(queue_of(InstanceMode.PERSISTENT, name), host) for host, served in self._hosts() for name in served
        ]
        return [{"name": name} for name in (CONTROL, *fed, *placed)]

    def _hosts(self) -> list[tuple[str, frozenset[str]]]:
        """Returns the hosts with standing instances, and their classes; none while the database is unavailable."""
        try:
            with self._database.begin() as connection:
                return sorted(host_images.standing(connection).items())
        except DatabaseUnavailable:
            return []

    def _provider(self, name: str) -> Provider:
        """Returns a provider; opens it at its first use if a resource class named it only after the start."""
        if name not in self._providers:
            self._providers = {**self._providers, name: providers.provider_named(name, self._settings)}
            if self._started:
                self._watch(self._providers[name])
        return self._providers[name]

    def _watch(self, provider: Provider) -> None:
        if isinstance(provider, WarnedProvider):
            provider.warn(self._warned)
        if isinstance(provider, WatchedProvider):
            self._thread(f"{provider.name}-events", lambda: provider.watch(self._exited, self._stop))

    def start(self) -> None:
        """Starts the threads; ticks are served from here on."""
        context.serve_ticks(Calendar(self._settings, self._database).tick)
        self._thread("dispatcher", lambda: self._dispatcher.run(self._stop))
        self._thread("reconciler", lambda: self._reconciler.run(self._stop))
        self._thread("auditor", lambda: self._auditor.run(self._stop))
        self._thread("transcripts", lambda: self._transcripts.run(self._stop))
        self._thread("webhooks", lambda: self._webhooks.run(self._stop))
        self._thread("hosts", lambda: joining.keep(self._settings, self._database, self._stop))
        self._thread("samples", lambda: self._samples.run(self._stop))
        if self._settings.traces_url is not None:
            from app.control.traces import Traces  # packages of an extra, slow to import

            traces = Traces(self._database, self._settings.traces_url)
            self._thread("traces", lambda: traces.run(self._stop))
        self._beside.enter_context(host_care.caring(self._settings, self._database))
        self._beside.callback(metrics.serve(self._settings, self._database))
        self._started = True
        for provider in self._providers.values():
            self._watch(provider)

    def stop(self) -> None:
        self._stop.set()
        self._beside.close()

    def _thread(self, name: str, work: Callable[[], None]) -> None:
        def keep_working() -> None:
            while not self._stop.is_set():
                try:
                    work()
                except Exception:  # a control thread goes on after any error
                    log.exception("control.thread_failed", thread=name)
                    self._stop.wait(1.0)

        threading.Thread(target=keep_working, name=name, daemon=True).start()

    def _launch(self, provider: str, requests: Sequence[InstanceRequest]) -> dict[UUID, str]:
        return self._provider(provider).launch(requests)

    def _alive(self) -> dict[str, dict[UUID, str]]:
        handles: dict[str, dict[UUID, str]] = {}
        for name, provider in self._providers.items():
            try:
                handles[name] = provider.alive()
            except InstanceFailed as error:
                log.warning("control.provider_silent", provider=name, error=str(error))
        return handles

    def _run_times(self) -> dict[str, dict[UUID, float | None]]:
        """Returns the run times of providers with a queue. If one does not answer, none of its instances are listed."""
        times: dict[str, dict[UUID, float | None]] = {}
        for name, provider in self._providers.items():
            if isinstance(provider, QueueingProvider):
                times[name] = {}
                with suppress(InstanceFailed):
                    times[name] = provider.started()
        return times

    def _terminate(self, provider: str, instance_id: UUID, handle: str) -> None:
        try:
            self._provider(provider).terminate(instance_id, handle, grace_s=0)
        except (InstanceFailed, UnknownName) as error:
            log.warning("control.not_terminated", instance_id=str(instance_id), error=str(error))

    def _warned(self, instance_id: UUID, why: str) -> None:
        log.warning("control.instance_warned", instance_id=str(instance_id), why=why)
        if instances.drain(self._database, [instance_id], why):
            nudge(self._settings, [instance_id])

    def _exited(self, instance_id: UUID, code: int | None, why: str) -> None:
        instances.exited(self._database, instance_id, code, why, self._retry)


def main() -> int:
    """Runs the worker until it is stopped. Returns its exit code."""
    settings = load()
    logs.configure(settings.log_level)
    control = Control(settings)
    Panel.register(name="active_queues", type="inspect")(control.queues)
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
    gc.freeze()  # permanent objects: without this, each full collection took 80 ms for them
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
