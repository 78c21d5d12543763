"""Maintains a host in one process, elected by a file lock: sweeping, reporting images and pressure, prefetching.

    with host_care.caring(settings, database): …

Use it only in processes that do not fork: the control worker, and standing instances (perhaps alone on their host).
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import structlog

from app.artifacts import open_store
from app.artifacts.bundles import fetch_bundle
from app.errors import DatabaseUnavailable
from app.host.slots import turn
from app.images.metadata import ImageChanges
from app.images.prefetch import Prefetcher
from app.ledger import host_images, pressure
from app.ledger.database import Database
from app.ledger.pressure import HostPressure
from app.ledger.upcoming import MOST, Upcoming
from app.models.spec import Bundle, EnvironmentSpec
from app.scheduling.placement import home_of
from app.settings import Settings
from app.workers import host_sweep
from app.workers.semaphores import LedgerSemaphore

log = structlog.get_logger()

Work = Callable[[threading.Event], None]
"""A function that blocks until the event is set."""

_LOOK_S = 2.0
_AWAY_S = 5.0
"""Interval of checking whether this host's maintenance process is alive."""
_LEAVING_S = 10.0
"""Time that running work has to end."""
_NEAR = 256
"""Number of tasks at the head of the queue to prefetch images for."""
_LEFT_ALONE = ("prefetch",)
"""Work that the worker does not wait for: the engine continues the pull, and the image is found later."""


def works(settings: Settings, database: Database) -> dict[str, Work]:
    """Returns all maintenance work of a host, by name."""
    tasks: dict[str, Work] = {
        "presence": Reporter(settings, database, settings.host()).run,
        "pressure": partial(keep_reporting, database, settings.host()),
        "sweep": partial(host_sweep.keep, settings, database, settings.host()),
    }
    if settings.image_prefetch:
        tasks["prefetch"] = partial(_pull_ahead, settings, database)
    return tasks


@contextmanager
def caring(settings: Settings, database: Database) -> Iterator[None]:
    """Maintains this host in the background during the block, while no other process does it."""
    stop = threading.Event()
    thread = threading.Thread(target=care, args=(settings, database, stop), name="host-care", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_LEAVING_S)


def care(settings: Settings, database: Database, stop: threading.Event) -> None:
    """Maintains this host like `caring`, until `stop` is set."""
    while not stop.is_set():
        try:
            with turn(settings.home / "run" / "slots" / "host-care", timeout_s=0.0):
                _work(works(settings, database), stop)
        except TimeoutError:
            stop.wait(_AWAY_S)
        except (OSError, RuntimeError) as error:  # temporarily out of files, disk space or threads
            log.warning("host_care.not_begun", reason=str(error))
            stop.wait(_AWAY_S)


def _work(all_of: Mapping[str, Work], stop: threading.Event) -> None:
    over, threads = threading.Event(), dict[str, threading.Thread]()
    try:
        for name, work in all_of.items():
            thread = threading.Thread(target=_keep_working, args=(name, work, over), name=name, daemon=True)
            thread.start()
            threads[name] = thread
        stop.wait()
    finally:  # also if one thread did not start: the next holder of the lock starts all of them
        over.set()
        for name, thread in threads.items():
            if name not in _LEFT_ALONE:
                thread.join()


def _keep_working(name: str, work: Work, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            work(stop)
        except Exception:  # host maintenance must restart after any error
            log.exception("host_care.failed", work=name)
            stop.wait(1.0)


class Reporter:
    """Reports this host's images to the ledger: when they change, and regularly as a sign that the host is alive."""

    def __init__(self, settings: Settings, database: Database, host: str) -> None:
        self._presence = ImageChanges(settings)
        self._database = database
        self._host = host
        self._images: frozenset[str] | None = None  # as last reported
        self._told_at = 0.0  # monotonic seconds

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                self.look()
            except DatabaseUnavailable as error:
                log.debug("host_care.away", reason=str(error))
            stop.wait(_LOOK_S)

    def look(self) -> None:
        """Raises: DatabaseUnavailable."""
        now = time.monotonic()
        images = self._presence.here()
        if images != self._images or now - self._told_at > host_images.ALIVE_S:
            host_images.report(self._database, self._host, images)
            self._images, self._told_at = images, now


_STALLED = re.compile(r"^some .*total=(\d+)$", re.MULTILINE)


class PressureGauge:
    """Reads the kernel's pressure stall information; if the kernel has none, the load per core.

    file: the kernel's file for CPUs; its total is the microseconds in which some process waited for a CPU.
    """

    def __init__(self, file: Path = Path("/proc/pressure/cpu")) -> None:
        self._file = file
        self._before = self._stalled_s(), time.monotonic()

    def read(self) -> HostPressure:
        """Returns the pressure since the last read."""
        stalled_s, now = self._stalled_s(), time.monotonic()
        cores = os.cpu_count() or 1
        before_s, then = self._before
        if stalled_s is None or before_s is None:
            cpu = 1 - cores / max(cores, os.getloadavg()[0])  # share of the runnable processes that wait
        else:
            cpu = (stalled_s - before_s) / max(1e-3, now - then)
        self._before = stalled_s, now
        memory = psutil.virtual_memory()
        return HostPressure(cores, min(1.0, max(0.0, cpu)), memory.available / memory.total)

    def _stalled_s(self) -> float | None:
        try:
            match = _STALLED.search(self._file.read_text())
        except OSError:
            return None
        return int(match[1]) / 1e6 if match else None


def keep_reporting(database: Database, host: str, stop: threading.Event) -> None:
    """Reports the host's pressure until `stop` is set."""
    gauge = PressureGauge()
    while not stop.wait(_LOOK_S):
        try:
            pressure.report_host(database, host, gauge.read())
        except DatabaseUnavailable as error:
            log.debug("host_care.away", reason=str(error))


def prefetcher(settings: Settings, database: Database) -> Prefetcher:
    """Returns a prefetcher; `run` it in a thread of a long-lived process that does not fork."""
    upcoming = Upcoming(database, fair=settings.dispatch_order == "fair")
    store = open_store(settings.artifacts(), endpoint_url=settings.s3_endpoint_url)

    def queue(far: bool) -> list[EnvironmentSpec]:
        return upcoming.needs(MOST if far else _NEAR)

    def fetch(bundle: Bundle) -> bytes:
        return fetch_bundle(store, bundle)

    return Prefetcher(
        settings, queue=queue, fetch_bundle=fetch, semaphore=LedgerSemaphore(database, lease_s=settings.lease_s)
    )


def _pull_ahead(settings: Settings, database: Database, stop: threading.Event) -> None:
    ahead = prefetcher(settings, database)
    ahead.others = partial(left_to_others, database, settings.host())
    ahead.run(stop)


def left_to_others(database: Database, host: str, images: Sequence[str]) -> Collection[str]:
    """Returns the images that other hosts have, plus the images without a host that others must fetch.

    Empty while a waiting task may be limited to one host: only tasks of standing pools can run where their image is.

    Raises: DatabaseUnavailable.
    """
    with database.begin() as connection:
        classes = host_images.standing(connection)
        alike = host in classes and len(set(classes.values())) == 1
        if len(classes) < 2 or not alike or not host_images.any_host_will_do(connection):
            return ()
        where = host_images.where(connection, images)
    return {image for image in images if _is_elsewhere(image, host, where.get(image, set()) & classes.keys(), classes)}


def _is_elsewhere(image: str, host: str, having: Collection[str], hosts: Collection[str]) -> bool:
    return any(other != host for other in having) if having else home_of(image, hosts) not in (host, None)
