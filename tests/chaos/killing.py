"""Kills a random process of a case every two seconds, for a while."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

import psutil

from tests.chaos.fixture import Fixture

_EVERY_S = 2.0


def kill_for(fixture: Fixture, seconds: float, weights: Mapping[str, int]) -> Counter[str]:
    """SIGKILL to one of `weights` (a program's name, `worker`, `redis`, `postgres`) every two seconds; what was."""
    killed: Counter[str] = Counter()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(_EVERY_S)
        what = random.choices(list(weights), list(weights.values()))[0]
        if _kill(fixture, what):
            fixture.struck(f"{what} SIGKILL")
            killed[what] += 1
    return killed


def _kill(fixture: Fixture, what: str) -> bool:
    """Kill one; servers are started again here, programs by their keeper. False: it was not there."""
    match what:
        case "redis":
            fixture.servers.kill_redis(keep_data=True)
            fixture.servers.start_redis()
        case "postgres":
            fixture.servers.kill_postgres()
            fixture.servers.start_postgres()
        case "worker":
            return _kill_worker(fixture)
        case _ if what in fixture.programs.pids:
            fixture.programs.kill(what)
        case _:
            return False
    return True


def _kill_worker(fixture: Fixture) -> bool:
    with suppress(psutil.Error, KeyError, ProcessLookupError):  # it may end meanwhile
        if workers := psutil.Process(fixture.programs.pids["launcher"]).children():
            os.kill(random.choice(workers).pid, signal.SIGKILL)
            return True
    return False
