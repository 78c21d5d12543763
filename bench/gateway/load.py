"""The load: so many callers at a time, each on a connection of its own, each asking again when it has its answer.

    python -m bench.gateway.load FILE       (a `Job` comes as JSON on its input; a `Told` goes as JSON into the file)

It reads no more of an answer than what was measured: the engine's stamps, the end, how many events there were. With
`hold` in the job's wish it prints a line when every stream has begun, and then waits for them to end.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import uvloop

from bench.gateway import wire
from bench.gateway.caller import Caller
from bench.gateway.processes import to_last_core
from bench.gateway.wire import Wish

BEGUN = "all streams have begun"
_FAULTS = 200
"""So many failed calls end the job: what is measured then is not what was meant."""
_AFTER_FAULT_S = 0.05
_OPENING = 64
"""Connections being made at once."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is asked of whom. Either `calls` in all, or for `seconds` after `warm_s` that do not count."""

    port: int
    path: str
    tokens: tuple[str, ...]
    width: int  # callers at a time
    wish: Wish
    calls: int | None = None
    seconds: float = 0.0
    warm_s: float = 0.0
    spread_s: float = 0.0  # over which callers begin, so that they do not come as one
    calls_per_token: int | None = None  # then the caller takes the next; None: it keeps its own
    give_up_s: float = 600.0


@dataclass(slots=True)
class Told:
    """What was measured; times in seconds, of each call that was begun and ended after the warm-up."""

    took_s: list[float] = field(default_factory=list)  # from the request's last byte sent to the answer's last
    beyond_s: list[float] = field(default_factory=list)  # of it, what the engine did not have the request
    first_s: list[float] = field(default_factory=list)  # from the engine's first event sent to its arrival here
    ended: int = 0  # after the warm-up, whenever they were begun
    events: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)

    @property
    def per_s(self) -> float:
        return self.ended / self.wall_s


class Load:
    """One job being done."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._serials = count()
        self._left = job.calls
        self._counts_from_ns = 0
        self._ends_ns = 0
        self._faults: Counter[str] = Counter()
        self._opening = asyncio.Semaphore(_OPENING)
        self._begun = 0
        self._last_ns = 0
        self.told = Told()

    async def run(self) -> Told:
        job = self._job
        now_ns = time.monotonic_ns()
        self._counts_from_ns = now_ns + int(job.warm_s * 1e9)
        self._ends_ns = now_ns + int((job.warm_s + job.seconds) * 1e9) if job.calls is None else sys.maxsize
        used = time.process_time()
        async with asyncio.timeout(job.give_up_s), asyncio.TaskGroup() as group:
            for number in range(job.width):
                group.create_task(self._callers_life(number))
        told = self.told
        told.cpu_s = time.process_time() - used
        # What counts is what ended within the window: its length is known, whatever the last calls took.
        told.wall_s = job.seconds if job.calls is None else (self._last_ns - now_ns) / 1e9
        told.faults = dict(self._faults)
        return told

    async def _callers_life(self, number: int) -> None:
        job = self._job
        await asyncio.sleep(job.spread_s * number / job.width)
        caller: Caller | None = None
        for request in self._requests(number):
            if self._is_over():
                break
            try:
                if caller is None or caller.transport is None:
                    caller = await self._connect()
                await self._one(caller, request)
            except (OSError, ValueError) as error:
                await self._failed(caller, f"{type(error).__name__}: {error}"[:300])
                caller = None
        if caller is not None and caller.transport is not None:
            caller.transport.close()

    def _is_over(self) -> bool:
        if time.monotonic_ns() >= self._ends_ns or sum(self._faults.values()) >= _FAULTS:
            return True
        if self._left is None:
            return False
        self._left -= 1
        return self._left < 0

    def _requests(self, number: int) -> Iterator[bytes]:
        """What this caller sends: as one attempt after the other, where each has a bounded number of calls."""
        job = self._job
        for turn in count():
            at = (number + turn * job.width) % len(job.tokens)
            body = wire.conversation(job.wish, owner=f"attempt {at}")
            head = (
                f"POST {job.path} HTTP/1.1\r\nhost: 127.0.0.1:{job.port}\r\ncontent-type: application/json\r\n"
                f"accept: */*\r\nauthorization: Bearer {job.tokens[at]}\r\ncontent-length: {len(body)}\r\n\r\n"
            ).encode()
            for _ in count() if job.calls_per_token is None else range(job.calls_per_token):
                yield head + body(next(self._serials))

    async def _connect(self) -> Caller:
        async with self._opening:
            loop = asyncio.get_running_loop()
            _, caller = await loop.create_connection(Caller, "127.0.0.1", self._job.port)
            return caller

    async def _one(self, caller: Caller, request: bytes) -> None:
        """Raises: ConnectionError, ValueError: it was not answered as it should be."""
        asked_ns = time.monotonic_ns()
        caller.send(request)
        if self._job.wish.hold:
            await caller.began
            self._announce()
        await caller.done
        body = caller.body()
        if caller.status != 200:
            raise ValueError(f"HTTP {caller.status}: {body[:200].decode(errors='replace')}")
        stamped = wire.stamp_in(body)
        if stamped is None:
            raise ValueError(f"an answer without the engine's stamp: {body[:200].decode(errors='replace')}")
        if self._job.wish.events and b"[DONE]" not in body[-64:]:
            raise ValueError("a stream without its end")
        self._count(caller, asked_ns, *stamped)
        if self._job.wish.events:
            self.told.events += body.count(b"data: ")

    def _count(self, caller: Caller, asked_ns: int, arrived_ns: int, sent_ns: int) -> None:
        if caller.ended_ns < self._counts_from_ns or caller.ended_ns > self._ends_ns:
            return
        self.told.ended += 1
        self._last_ns = caller.ended_ns
        if asked_ns < self._counts_from_ns:
            return
        took_ns = caller.ended_ns - asked_ns
        self.told.took_s.append(took_ns / 1e9)
        self.told.beyond_s.append((took_ns - (sent_ns - arrived_ns)) / 1e9)
        self.told.first_s.append((caller.first_ns - sent_ns) / 1e9)

    def _announce(self) -> None:
        self._begun += 1
        if self._begun == self._job.width:
            print(BEGUN, flush=True)

    async def _failed(self, caller: Caller | None, why: str) -> None:
        self._faults[why] += 1
        if caller is not None and caller.transport is not None:
            caller.transport.close()
        await asyncio.sleep(_AFTER_FAULT_S)


def job_of(told: dict[str, Any]) -> Job:
    """A job from its JSON."""
    return Job(**told | {"wish": Wish(**told["wish"]), "tokens": tuple(told["tokens"])})


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    to_last_core()
    told = uvloop.run(Load(job_of(json.loads(sys.stdin.read()))).run())
    Path(sys.argv[1]).write_text(json.dumps(asdict(told)))


if __name__ == "__main__":
    main()
