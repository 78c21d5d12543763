"""Writes the changes of thousands of simulated instances in one statement per kind.

A writer is a thread with a connection. New items queue up while it writes: a busier system has larger batches.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from app.errors import DatabaseUnavailable, MegaFlowError

log = structlog.get_logger()

_WINDOW_S = 0.005
_BATCH = 1000
_AGAIN_S = 0.3


@dataclass(slots=True)
class Verb:
    """A kind of write: `write` runs on the writer, `heard` on the thread of the items' owner."""

    name: str
    write: Callable[[Sequence[Any]], Any]
    heard: Callable[[Sequence[Any], Any], None]
    waiting: deque[Any] = field(default_factory=deque)
    rows: int = 0
    took_s: float = 0.0


class BatchWriter:
    """Writes batches in the order of its verbs. Retries batches while PostgreSQL is unavailable."""

    def __init__(self, name: str, verbs: Sequence[Verb], post: Callable[..., object]) -> None:
        self.verbs = {verb.name: verb for verb in verbs}
        self._post = post
        self._work = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"writer-{name}", daemon=True)
        self._thread.start()

    def put(self, verb: str, *items: Any) -> None:
        """Queues items to be written soon."""
        self.verbs[verb].waiting.extend(items)
        self._work.set()

    def idle(self) -> bool:
        return not self._work.is_set()

    def close(self) -> None:
        self._closing = True
        self._work.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._closing:
            self._work.wait()
            time.sleep(_WINDOW_S)
            if not self._round():
                time.sleep(_AGAIN_S)
            self._rest()

    def _rest(self) -> None:
        self._work.clear()
        if any(verb.waiting for verb in self.verbs.values()):
            self._work.set()

    def _round(self) -> bool:
        """Writes one round. False: PostgreSQL is unavailable; later verbs then wait, so no end overtakes a phase."""
        # Counted backwards: if an end is counted, the phase put before it is counted too.
        counted = [(verb, len(verb.waiting)) for verb in reversed(self.verbs.values())]
        for verb, count in reversed(counted):
            while count > 0:
                batch = [verb.waiting.popleft() for _ in range(min(_BATCH, count))]
                count -= len(batch)
                if not self._write(verb, batch):
                    return False
        return True

    def _write(self, verb: Verb, batch: list[Any]) -> bool:
        begun = time.perf_counter()
        try:
            answer = verb.write(batch)
        except DatabaseUnavailable as error:
            log.warning("simulation.not_written", verb=verb.name, rows=len(batch), error=str(error))
            verb.waiting.extendleft(reversed(batch))
            return False
        except MegaFlowError:
            log.exception("simulation.refused", verb=verb.name, rows=len(batch))
            return True
        verb.rows += len(batch)
        verb.took_s += time.perf_counter() - begun
        self._post(verb.heard, batch, answer)
        return True
