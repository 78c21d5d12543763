"""Services started in the order of their needs, those that are independent at the same time, all under one deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress

from app.compose_file.file import Project
from app.compose_file.model import Condition
from app.environments.runtimes.compose.service import Peer
from app.errors import ServiceUnhealthy, StationError

_LOOK_S = 0.2


class Order:
    """One start of a project.

    place: a place among those who may start containers now; taken by the calling thread alone, once for each wave.
    start_main: starts the main service in the calling thread and waits until it is healthy; None: it runs already.
    """

    def __init__(
        self,
        project: Project,
        peers: dict[str, Peer],
        place: Callable[[], AbstractContextManager[None]],
        start_main: Callable[[], None] | None,
    ) -> None:
        self._project = project
        self._peers = peers
        self._place = place
        self._start_main = start_main
        self._reached: dict[str, set[Condition]] = {}
        self._watched: dict[Future[Condition], str] = {}
        self._stop = threading.Event()

    def carry_out(self, deadline: float) -> None:
        """Raises: ServiceUnhealthy: names the service that ended, is unhealthy, or was not ready by `deadline`."""
        waiting = set(self._project.services)
        if self._start_main is None:
            waiting.discard(self._project.main)
            self._reached[self._project.main] = {Condition.STARTED, Condition.HEALTHY}
        with ThreadPoolExecutor(max(1, len(self._peers))) as pool:
            try:
                while waiting or self._watched:
                    waiting -= self._start_ready(waiting, pool, deadline)
                    self._note_settled(waiting, deadline)
                for peer in self._peers.values():
                    peer.refuse_ended()
            finally:
                self._stop.set()
                if self._watched:  # a check that hangs need not be waited for
                    for peer in self._peers.values():
                        peer.close()

    def _start_ready(self, waiting: set[str], pool: ThreadPoolExecutor, deadline: float) -> set[str]:
        """Start all whose needs are met; who that was."""
        ready = [name for name in self._project.services if name in waiting and self._may_start(name)]
        peers = [name for name in ready if name in self._peers]
        if peers:
            with self._place():
                for start in [pool.submit(self._peers[name].start) for name in peers]:
                    start.result()
            for name in peers:
                awaited = self._project.awaited(name)
                self._reached[name] = {Condition.STARTED}
                self._watched[pool.submit(self._peers[name].settle, awaited, self._stop, deadline)] = name
            return set(peers)
        if ready and self._start_main is not None:
            self._start_main()
            self._reached[self._project.main] = {Condition.STARTED, Condition.HEALTHY}
        return set(ready)

    def _may_start(self, name: str) -> bool:
        needs = self._project.waits_for(name).items()
        return all(condition in self._reached.get(other, set()) for other, condition in needs)

    def _note_settled(self, waiting: set[str], deadline: float) -> None:
        if any(self._may_start(name) for name in waiting):
            return
        done, _ = wait(self._watched, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
        for future in done:
            name = self._watched.pop(future)
            self._reached[name].add(future.result())
        if time.monotonic() > deadline + 1.0 and not done:  # each says so itself, unless its engine does not answer
            raise ServiceUnhealthy(f"{', '.join(sorted(self._watched.values()))}: not ready in time.")
        if waiting and not self._watched and not any(self._may_start(name) for name in waiting):
            raise ServiceUnhealthy(self._stuck(waiting))

    def _stuck(self, waiting: set[str]) -> str:
        """All that was started has settled, and somebody waits on."""
        lines = []
        for name in sorted(waiting):
            for other, condition in self._project.waits_for(name).items():
                reached = self._reached.get(other)
                if reached is not None and condition not in reached:
                    lines.append(f"service {name!r} waits for {other!r} to be {condition}, which it will not be")
        return "; ".join(lines) or f"{', '.join(sorted(waiting))} cannot be started"


def logs_of(peers: dict[str, Peer]) -> dict[str, bytes]:
    """Whatever can be had: evidence is worth less than the attempt."""
    found = {}
    for name, peer in peers.items():
        with suppress(StationError):
            found[name] = peer.log()
    return found
