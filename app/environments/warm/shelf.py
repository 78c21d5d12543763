"""What stands ready in this process, by key. Safe to share between threads."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from app.environments.base import Environment, Taking
from app.models.spec import EnvironmentSpec


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """An environment that nobody has used. `turn` is held by who gives it away or puts its deadline off.

    phases: what its making took, in seconds.
    """

    environment: Environment
    spec: EnvironmentSpec
    provider: Taking
    phases: Mapping[str, float] = field(default_factory=dict)
    turn: threading.Lock = field(default_factory=threading.Lock)


class Shelf:
    """Ready environments, and how many are being made; keys are digests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready: dict[str, deque[Ready]] = {}  # oldest first
        self._making: Counter[str] = Counter()
        self._closed = False

    def stock(self) -> tuple[Counter[str], Counter[str]]:
        """How many are ready, and how many are being made."""
        with self._lock:
            return Counter({key: len(found) for key, found in self._ready.items()}), Counter(self._making)

    def begin(self, key: str) -> None:
        """One is being made from now on: `end` follows."""
        with self._lock:
            self._making[key] += 1

    def end(self, key: str, made: Ready | None) -> bool:
        """It is made (None: it could not be). False: nobody wants it any more, it is the caller's to destroy."""
        with self._lock:
            self._making[key] -= 1
            self._making += Counter()  # forgets what is at zero
            if made is None or self._closed:
                return made is None
            self._ready.setdefault(key, deque()).append(made)
            return True

    def take(self, key: str) -> Ready | None:
        """One of these, the caller's from now on; None when there is none."""
        with self._lock:
            found = self._ready.get(key)
            taken = found.popleft() if found else None
            if not found:
                self._ready.pop(key, None)
            return taken

    def drop(self, one: Ready) -> bool:
        """Take exactly this one off; False when somebody has it already."""
        with self._lock:
            for key, found in self._ready.items():
                if one in found:
                    found.remove(one)
                    if not found:
                        del self._ready[key]
                    return True
        return False

    def holds(self, one: Ready) -> bool:
        with self._lock:
            return any(one in found for found in self._ready.values())

    def all(self) -> list[Ready]:
        with self._lock:
            return [one for found in self._ready.values() for one in found]

    def close(self) -> list[Ready]:
        """Take nothing more, and give away what there is."""
        with self._lock:
            self._closed = True
            left = [one for found in self._ready.values() for one in found]
            self._ready.clear()
            return left
