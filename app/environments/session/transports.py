"""The ways into a container: what its first process is, and how commands and files get inside.

Best first. Which one serves is found out by doing, once per engine and process, not by the look of an address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

import structlog

from app.environments.session.copied import CopiedHelper
from app.environments.session.mounted import MountedEntrance, MountedHelper
from app.environments.session.transport import Entrance, Inside, Session, Way, WayClosed
from app.host.engine import Engine

__all__ = [
    "WAYS",
    "Choice",
    "CopiedHelper",
    "Entrance",
    "Inside",
    "Kinds",
    "MountedEntrance",
    "MountedHelper",
    "Session",
    "Way",
    "WayClosed",
    "choice_for",
]

log = structlog.get_logger()

Kinds = tuple[Callable[[Engine, Path], Way], ...]
WAYS: Kinds = (MountedHelper, CopiedHelper)


@dataclass
class Choice:
    """Which way an engine's containers have. Safe for many threads: at worst two of them find out the same."""

    engine: Engine
    home: Path
    kinds: Kinds
    proven: Way | None = None
    _closed: set[int] = field(default_factory=set)

    def candidates(self) -> Iterator[Way]:
        """The proven way alone, else those that were not found closed, best first."""
        if self.proven is not None:
            yield self.proven
            return
        for number, kind in enumerate(self.kinds):
            if number in self._closed:
                continue
            try:
                yield kind(self.engine, self.home)
            except WayClosed as error:
                log.info("environment.way_closed", way=getattr(kind, "__name__", "?"), reason=str(error))
                self._closed.add(number)

    def prove(self, way: Way) -> None:
        if self.proven is None:
            log.info("environment.way_chosen", way=type(way).__name__, engine=self.engine.url)
            self.proven = way


def choice_for(engine: Engine, home: Path, kinds: Kinds) -> Choice:
    """What is known of the engine in this process."""
    return _choices.setdefault(engine, {}).setdefault((home, kinds), Choice(engine, home, kinds))


_choices: WeakKeyDictionary[Engine, dict[tuple[Path, Kinds], Choice]] = WeakKeyDictionary()
