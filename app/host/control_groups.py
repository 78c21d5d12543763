"""Where this host counts for a container: its control groups, of version 1 or 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def folders_of(container_id: str, init: int, controller: str) -> Iterator[Path]:
    """The controller's group of a container with that first process, and where version 2 has them all; likelier first.

    None when the process is another's. What is told need not be there.
    """
    for line in _groups(init):
        _, controllers, path = line.split(":", 2)
        if container_id not in path:  # a process of that number, but not that container's
            continue
        if controllers == controller:
            yield _ROOT / controller / path.lstrip("/")
        elif not controllers:
            yield _ROOT / path.lstrip("/")


def processes_of(container_id: str, init: int) -> list[int]:
    """The processes of a container with that first process, by this host's numbers.

    None when the engine is elsewhere.
    """
    found: set[int] = set()
    for folder in folders_of(container_id, init, "pids"):
        with suppress(OSError):
            found |= {int(line) for line in (folder / "cgroup.procs").read_text().split()}
    return sorted(found)


def is_of(container_id: str, init: int) -> bool:
    """Whether the process of that number on this host is in that container: not so when the engine is elsewhere."""
    return any(container_id in line for line in _groups(init))


def _groups(process: int) -> list[str]:
    try:
        return Path(f"/proc/{process}/cgroup").read_text().splitlines()
    except OSError:
        return []
