"""Ends environments that write more than their limit, where the file system has no quota.

While the disk's free space does not shrink, a check costs one system call; only otherwise are folders measured.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import structlog

from app.errors import EnvironmentFailed, EnvironmentOverLimit, HostDiskFull, StationError
from app.host.disk import MOST_FILES, DiskUsage
from app.host.slots import turn
from app.models.spec import EnvironmentSpec

log = structlog.get_logger()

LIMIT_BYTES = 16 << 30
"""Bytes that an environment may write when its task sets no limit."""
_BYTES_PER_FILE = 16 << 10
"""Bytes of the disk limit per allowed file, similar to the ratio of inodes on disks."""
_LEAST_FILES = 250_000
"""Files allowed in every environment: packages of some languages have a hundred thousand small files."""
_CHECK_S = 0.5
_GROWTH_BYTES = 32 << 20
_GROWTH_FILES = 20_000
"""Folders are measured when free space or free inodes have shrunk by this much."""
_FULL_CHECK_S = 10.0
"""Longest time between measurements: environments may grow while others shrink."""
_TURN_S = 5.0
"""Longest wait for other processes that measure."""
_RESERVE = 0.02
"""Share of the disk and its inodes reserved for the host: below it the largest environment ends, whatever its limit."""


class WatchedEnvironment(Protocol):
    """Environment whose files lie on the watched disk."""

    @property
    def id(self) -> str: ...
    @property
    def gone(self) -> bool: ...
    def written(self) -> DiskUsage | None: ...
    def fail(self, why: str, *, kind: type[EnvironmentFailed]) -> None: ...


def limit_of(spec: EnvironmentSpec) -> int:
    """Returns the bytes that an environment may write."""
    return spec.resources.disk_bytes or LIMIT_BYTES


def files_within(limit_bytes: int) -> int:
    """Returns the number of files that an environment with this limit of bytes may have."""
    return min(max(_LEAST_FILES, limit_bytes // _BYTES_PER_FILE), MOST_FILES)


def _no_bytes(disk: os.statvfs_result) -> bool:
    return disk.f_bavail < disk.f_blocks * _RESERVE


def _no_inodes(disk: os.statvfs_result) -> bool:
    """Whether inodes are short. Some file systems have no fixed number of inodes and report 0: never short."""
    return disk.f_favail < disk.f_files * _RESERVE


def _nearly_full(disk: os.statvfs_result) -> bool:
    return _no_bytes(disk) or _no_inodes(disk)


class DiskWatch:
    """Watches the environments of this process, while there are any."""

    def __init__(self, folder: Path, turns: Path, sizes: Callable[[], dict[str, DiskUsage]]) -> None:
        """folder: on the disk. turns: lock file, one measurement at a time on this host. sizes: usage of all by id."""
        self._folder = folder
        self._turns = turns
        self._sizes = sizes
        self._lock = threading.Lock()
        self._watched: weakref.WeakKeyDictionary[WatchedEnvironment, int] = weakref.WeakKeyDictionary()
        self._thread: threading.Thread | None = None
        self._free_bytes = self._free_files = 0
        self._checked = 0.0

    def watch(self, environment: WatchedEnvironment, limit_bytes: int) -> None:
        """Watches an environment until it is gone, or is no longer referenced."""
        with self._lock:
            self._watched[environment] = limit_bytes
            if self._thread is None or not self._thread.is_alive():  # a fork does not inherit its parent's threads
                self._free_bytes = self._free_files = 0
                self._thread = threading.Thread(target=self._go_on, name="disk-watch", daemon=True)
                self._thread.start()

    def forget(self, environment: WatchedEnvironment) -> None:
        """Stops watching an environment, because it is part of another watched one."""
        with self._lock:
            self._watched.pop(environment, None)

    def _go_on(self) -> None:
        while True:
            time.sleep(_CHECK_S)
            with self._lock:
                for environment in [one for one in self._watched if one.gone]:
                    del self._watched[environment]
                if not self._watched:
                    self._thread = None
                    return
            try:
                self.check()
            except (OSError, StationError) as error:
                log.warning("disk_watch.failed", reason=str(error))

    def check(self) -> None:
        """Ends environments over their limits, and the largest one when the disk is nearly full."""
        disk = os.statvfs(self._folder)
        free_bytes, free_files = disk.f_bavail * disk.f_frsize, disk.f_favail
        full = _nearly_full(disk)
        shrunk = free_bytes < self._free_bytes - _GROWTH_BYTES or free_files < self._free_files - _GROWTH_FILES
        if not (full or shrunk or time.monotonic() - self._checked > _FULL_CHECK_S):
            self._free_bytes, self._free_files = max(self._free_bytes, free_bytes), max(self._free_files, free_files)
            return
        self._checked, self._free_bytes, self._free_files = time.monotonic(), free_bytes, free_files
        self._end_those_over_their_limits()
        if full:
            self._end_the_largest()

    def _end_those_over_their_limits(self) -> None:
        with self._lock:
            watched = list(self._watched.items())
        for environment, limit_bytes in watched:
            usage, most_files = self._written(environment), files_within(limit_bytes)
            if environment.gone:
                continue
            if usage.size_bytes > limit_bytes:
                why = f"disk limit of {limit_bytes} bytes reached, {usage.size_bytes} written"
                self._end(environment, why, EnvironmentOverLimit)
            elif usage.files > most_files:
                why = f"disk limit of {most_files} files reached, {usage.files} made"
                self._end(environment, why, EnvironmentOverLimit)

    @staticmethod
    def _written(environment: WatchedEnvironment) -> DiskUsage:
        """Measures an environment; an error (it is ending, or too large) counts as 0, so that others are measured."""
        try:
            return environment.written() or DiskUsage()
        except (OSError, StationError) as error:
            log.debug("environment.not_measured", environment=environment.id, reason=str(error))
            return DiskUsage()

    def _end_the_largest(self) -> None:
        """Ends the largest environment of all processes if it is ours; otherwise its own process ends it.

        One process checks at a time. An ended environment counts until its files are gone, so that only one is ended.
        """
        try:
            with turn(self._turns, timeout_s=_TURN_S):
                disk = os.statvfs(self._folder)
                if not _nearly_full(disk):
                    return  # there is enough space again
                by_files = not _no_bytes(disk)
                identity, usage = max(
                    self._sizes().items(),
                    key=lambda one: one[1].files if by_files else one[1].size_bytes,
                    default=("", DiskUsage()),
                )
                with self._lock:
                    ours = [one for one in self._watched if one.id == identity and not one.gone]
                if usage.files > _GROWTH_FILES if by_files else usage.size_bytes > _GROWTH_BYTES:
                    much = f"{usage.files} files" if by_files else f"{usage.size_bytes} bytes"
                    for environment in ours:
                        why = (
                            f"the host's disk is nearly full, and of all it had written most ({much}, "
                            "within its limit); free some under MEGAFLOW_HOME, or run fewer at a time"
                        )
                        self._end(environment, why, HostDiskFull)
        except TimeoutError:  # others are checking
            return

    def _end(self, environment: WatchedEnvironment, why: str, kind: type[EnvironmentFailed]) -> None:
        try:
            environment.fail(why, kind=kind)
        except (OSError, StationError) as error:
            log.warning("environment.not_ended", environment=environment.id, reason=str(error))
