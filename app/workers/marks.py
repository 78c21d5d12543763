"""What the processes of one home tell each other without a server: files that are touched again and again.

One who is gone touches no more, so nothing has to be taken back.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

from app.settings import Settings

LASTS_S = 10.0
"""So long a mark is believed; whoever makes it does so more often."""
DISPATCHES = "dispatcher-leads"
"""The dispatcher that decides is here: instances are started from here."""
_HOSTS = "hosts-here"
_OLD_S = 86_400.0


def make(settings: Settings, name: str) -> None:
    """Raises nothing: where there is no space, the next time will do."""
    with suppress(OSError):
        mark = _file(settings, name)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def stands(settings: Settings, name: str, within_s: float = LASTS_S) -> bool:
    """Whether it was made in the last `within_s` seconds."""
    return _is_fresh(_file(settings, name), within_s)


def host_is_here(settings: Settings, host: str) -> None:
    """A process of this home knows its host by that name: those in containers may share a home, and have their own."""
    make(settings, f"{_HOSTS}/{quote(host, safe='')}")


def hosts_here(settings: Settings) -> frozenset[str]:
    """The names that processes of this home have for their host."""
    try:
        found = list(_file(settings, _HOSTS).iterdir())
    except OSError:
        return frozenset()
    for mark in found:  # every container had a name of its own
        if not _is_fresh(mark, _OLD_S):
            mark.unlink(missing_ok=True)
    return frozenset(unquote(mark.name) for mark in found if _is_fresh(mark, LASTS_S))


def _is_fresh(mark: Path, within_s: float) -> bool:
    """One from the future is none: a clock was set back."""
    try:
        return -within_s < time.time() - mark.stat().st_mtime < within_s
    except OSError:
        return False


def _file(settings: Settings, name: str) -> Path:
    return settings.home / "run" / name
