"""A cgroup around the steps of a build, where this process may make one for the engine: a bound from the first moment.

Only of processes: for the rest the builder has parameters of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import structlog

from app.host.engine import Engine
from app.images.disk_thresholds import disk_of

log = structlog.get_logger()

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "megaflow-build-"
"""Folders whose name begins with `megaflow-` and that were not removed are swept with those of environments."""
_REMOVAL_S = 2.0


@contextmanager
def bounded(engine: Engine, pids: int) -> Iterator[dict[str, Any]]:
    """What a build is told besides, for the length of the block; nothing where we may not bound it like this.

    Raises: EngineUnavailable, EnvironmentFailed.
    """
    name = f"{_PREFIX}{uuid4().hex[:16]}"
    if engine.about.get("CgroupDriver") != "cgroupfs" or disk_of(engine) is None:  # systemd's, or another host's
        yield {}
        return
    try:
        _make(name, pids)
    except OSError as error:
        log.debug("build.no_cgroup", reason=str(error))
        _remove(name)
        yield {}
        return
    try:
        yield {"cgroupparent": f"/{name}"}
    finally:
        _remove(name)


def _make(name: str, pids: int) -> None:
    """Raises: OSError: no such controller here, or not ours to use."""
    folder = (_ROOT if (_ROOT / "cgroup.controllers").exists() else _ROOT / "pids") / name
    folder.mkdir()
    handle = os.open(folder / "pids.max", os.O_WRONLY | os.O_CLOEXEC)  # made by the kernel, or not there
    try:
        os.write(handle, str(pids).encode())
    finally:
        os.close(handle)


def _remove(name: str) -> None:
    """The engine makes one of the same name for every controller. A step that is being killed keeps it a little."""
    give_up = time.monotonic() + _REMOVAL_S
    while left := [place / name for place in (_ROOT, *_ROOT.iterdir()) if (place / name).is_dir()]:
        for folder in left:
            with suppress(OSError):
                folder.rmdir()
        if time.monotonic() > give_up:
            log.debug("build.cgroup_left", name=name)
            return
        time.sleep(0.01)
