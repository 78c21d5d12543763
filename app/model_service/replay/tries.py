"""How often a turn was tried: the one thing that the engine remembers, for faults that pass."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

_MOST = 100_000


class Tries:
    """Counts by key; the keys that were longest unused are forgotten beyond a bound."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._counts: OrderedDict[Hashable, int] = OrderedDict()

    def next(self, key: Hashable) -> int:
        """The number of this try, from 1."""
        count = self._counts.pop(key, 0) + 1
        self._counts[key] = count
        if len(self._counts) > self._most:
            self._counts.popitem(last=False)
        return count
