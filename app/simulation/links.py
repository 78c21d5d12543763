"""Simulates image downloads: those of one instance share its link, all share the registry."""

from __future__ import annotations

import time
from asyncio import AbstractEventLoop
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from app.models.simulation import Simulation
from app.simulation.instances import Attempt, Instance

_TICK_S = 0.02


@dataclass(slots=True)
class Download:
    """A running image download. `left_s`: seconds for the rest, alone on the link."""

    attempt: Attempt
    left_s: float
    done: Callable[[Attempt, float], None]


class Links:
    """Links of all instances. Used on the clock's thread. `registry_links`: full-speed registry links; 0: unlimited.

    `together`: number of downloads that start at the same time; the attempts then begin with their downloads.
    """

    def __init__(self, clock: AbstractEventLoop) -> None:
        self._clock = clock
        self._downloads: defaultdict[Instance, list[Download]] = defaultdict(list)
        self._seen = 0.0
        self._held: list[Download] = []
        self.registry_links = 0.0
        self.together = 0
        self._told: Simulation | None = None

    def follow(self, told: Simulation) -> None:
        """Uses new settings from now on; downloads are held (`together`) once per new settings."""
        if told is not self._told:
            self._told, self.together, self.registry_links = told, told.together, told.registry_links

    def download(self, attempt: Attempt, alone_s: float, done: Callable[[Attempt, float], None]) -> None:
        """Downloads for `alone_s` of a full link, then calls `done` with the attempt and time (monotonic seconds)."""
        self._held.append(Download(attempt, alone_s, done))
        if len(self._held) < self.together:
            return
        self.together = 0
        if not self._downloads:
            self._seen = time.monotonic()
            self._clock.call_later(_TICK_S, self._advance)
        else:
            self._share()  # until now only the earlier downloads used the links
        begun, self._held = self._held, []
        for one in begun:
            one.attempt.begun = self._seen
            self._downloads[one.attempt.instance].append(one)

    def _advance(self) -> None:
        self._share()
        if self._downloads:
            self._clock.call_later(_TICK_S, self._advance)

    def _share(self) -> None:
        now = time.monotonic()
        passed_s, self._seen = now - self._seen, now
        count = sum(map(len, self._downloads.values()))
        most = self.registry_links / count if self.registry_links and count else 1.0
        for instance, downloads in list(self._downloads.items()):
            rate = min(1.0 / len(downloads), most)
            for one in downloads:
                one.left_s -= passed_s * rate
            left = [one for one in downloads if one.left_s > 0 and not one.attempt.over]
            if left:
                self._downloads[instance] = left
            else:
                del self._downloads[instance]
            for one in downloads:
                if one.left_s <= 0 and not one.attempt.over:
                    one.done(one.attempt, now + one.left_s / rate)  # subtracts the excess time of this tick
