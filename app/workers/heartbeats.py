"""Heartbeat files shared by processes with the same MEGAFLOW_HOME. A stale mtime means the process is gone."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from app.settings import Settings

LASTS_S = 10.0
"""How long a heartbeat file is believed; it is touched more often."""


def make(settings: Settings, name: str) -> None:
    """Raises nothing: where there is no space, the next time will do."""
    with suppress(OSError):
        mark = _file(settings, name)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def stands(settings: Settings, name: str, within_s: float = LASTS_S) -> bool:
    """Whether it was made in the last `within_s` seconds."""
    return _is_fresh(_file(settings, name), within_s)


def _is_fresh(mark: Path, within_s: float) -> bool:
    """One from the future is none: a clock was set back."""
    try:
        return -within_s < time.time() - mark.stat().st_mtime < within_s
    except OSError:
        return False


def _file(settings: Settings, name: str) -> Path:
    return settings.home / "run" / name
