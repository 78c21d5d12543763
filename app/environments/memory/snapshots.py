"""File systems of memory environments that are kept: by this process, until it ends or their deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from uuid import uuid4

from app.environments.base import Snapshot, Tags
from app.environments.memory.files import Node
from app.errors import EnvironmentFailed

KIND = "memory"


@dataclass(frozen=True)
class _Kept:
    root: Node
    tags: Tags


_kept: dict[str, _Kept] = {}
_lock = threading.Lock()


def keep(root: Node, tags: Tags) -> Snapshot:
    """root: ours from now on; nobody changes it."""
    found = Snapshot(KIND, uuid4().hex, "")
    with _lock:
        _forget_overdue()
        _kept[found.id] = _Kept(root, tags)
    return found


def find(snapshot: Snapshot) -> Node:
    """What to copy. Raises: EnvironmentFailed: it is gone, or another kind's."""
    if snapshot.kind != KIND:
        raise EnvironmentFailed(f"expected a snapshot of the kind {KIND!r}, found {snapshot.kind!r}.")
    with _lock:
        _forget_overdue()
        if snapshot.id not in _kept:
            raise EnvironmentFailed(f"snapshot {snapshot.id} is gone: it was removed, or its deadline has passed.")
        return _kept[snapshot.id].root


def remove(snapshot: Snapshot) -> None:
    with _lock:
        _kept.pop(snapshot.id, None)


def sweep(installation: str, keep: Mapping[str, bool]) -> list[str]:
    """Remove an installation's but those that are kept; their ids."""
    with _lock:
        _forget_overdue()
        doomed = [name for name, one in _kept.items() if one.tags.installation == installation]
        doomed = [name for name in doomed if not keep.get(name, False)]
        for name in doomed:
            del _kept[name]
        return doomed


def _forget_overdue() -> None:
    """No sweeper sees what is in here."""
    for name in [name for name, one in _kept.items() if one.tags.deadline_unix_s < time.time()]:
        del _kept[name]
