"""Processes that change control groups, as each container's first one does: without waiting for the whole kernel.

A kernel makes such a change wait until every processor has passed a quiet point, 8 to 15 ms, which is a fifth of a
container's start. Since Linux 6.0 a host can be told that it happens often (`favordynmods`, kernel documentation
"Control Group v2", mount options): a change is then immediate, and a fork a trifle dearer.
"""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

_MOUNTS = Path("/proc/self/mountinfo")
_OPTION = "favordynmods"
_PATIENCE_S = 10.0


def favour() -> bool:
    """Tell this host's kernel; whether it knows now. Not for ever: until the next boot."""
    found = _version_2()
    if found is None or _OPTION in found[1]:
        return found is not None
    command = ["mount", "-o", f"remount,{_OPTION}", found[0]]  # by the program, which keeps all other options
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_PATIENCE_S)  # noqa: S603 (ours)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        log.info("cgroup_moves.not_favoured", reason=str(error), said=said.decode("utf-8", "replace").strip())
    return favoured()  # who is not in the first namespace of control groups is not refused, and not heard either


def favoured() -> bool:
    """Whether the kernel has been told."""
    found = _version_2()
    return found is not None and _OPTION in found[1]


def _version_2() -> tuple[str, list[str]] | None:
    """Where control groups of version 2 are mounted, with their options: for all versions it is told there."""
    with suppress(OSError):
        for line in _MOUNTS.read_text(errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            kind, *_, options = after.split(" ")  # what is mounted may have no name
            if kind == "cgroup2":
                return before.split(" ")[4], options.split(",")
    return None
