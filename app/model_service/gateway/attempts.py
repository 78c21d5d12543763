"""What the gateway remembers of an attempt while it calls: what is under way, where it is served, how long it waits.

Nothing here outlives the process, and nothing has to: accounts come from the ledger, routes find themselves again.
"""

from __future__ import annotations

import asyncio
import time
from uuid import UUID

_FORGET_S = 900.0
_SWEEP_S = 60.0


class AttemptCalls:
    """One attempt's calls."""

    __slots__ = (
        "_ended",
        "closed",
        "in_flight",
        "prompt_bytes",
        "prompt_tokens",
        "stuck",
        "tool_turns",
        "turns",
        "under_way",
        "used_at",
        "waiting_since",
    )

    def __init__(self) -> None:
        self.in_flight = 0
        self.under_way = 0  # of them: allowed, so that they may cost something
        self.turns = 0  # of these: may become a turn, and offer no tools
        self.tool_turns = 0  # offer tools
        self.stuck: dict[str, str] = {}
        self.prompt_tokens = 0  # of the last answered turn, as its engine counted them, and how long its request was
        self.prompt_bytes = 0
        self.waiting_since: dict[UUID, float] = {}  # by call
        self.closed = False
        self.used_at = time.monotonic()
        self._ended: asyncio.Event | None = None

    def enter(self) -> None:
        self.in_flight += 1

    def enters(self, *, turn: bool, tools: bool) -> None:
        """One of them is allowed."""
        self.under_way += 1
        self.tool_turns += turn and tools
        self.turns += turn and not tools

    def leave(self, *, allowed: bool, turn: bool, tools: bool) -> None:
        self.in_flight -= 1
        self.under_way -= allowed
        self.tool_turns -= turn and tools
        self.turns -= turn and not tools
        self.used_at = time.monotonic()
        if self._ended is not None:
            self._ended.set()
            self._ended = None

    def close(self) -> None:
        """No more calls are taken."""
        self.closed = True
        self.used_at = time.monotonic()

    async def one_ends(self, timeout_s: float) -> None:
        """Until some call of it has ended. Raises: TimeoutError."""
        if self._ended is None:
            self._ended = asyncio.Event()
        async with asyncio.timeout(timeout_s):
            await self._ended.wait()

    def waiting_s(self) -> float:
        """Seconds that calls under way have waited for limits and busy engines up to now, all together."""
        now = time.monotonic()
        return sum(now - since for since in self.waiting_since.values())


class Attempts:
    """All attempts that called lately. For one event loop."""

    def __init__(self) -> None:
        self._by_id: dict[UUID, AttemptCalls] = {}
        self._swept_at = time.monotonic()

    def of(self, attempt_id: UUID) -> AttemptCalls:
        found = self._by_id.get(attempt_id)
        if found is None:
            self._sweep()
            found = self._by_id[attempt_id] = AttemptCalls()
        return found

    @property
    def in_flight(self) -> int:
        return sum(one.in_flight for one in self._by_id.values())

    async def all_ended(self, timeout_s: float) -> None:
        """Until nothing is under way any more, or for so long."""
        give_up = time.monotonic() + timeout_s
        while self.in_flight and time.monotonic() < give_up:
            await asyncio.sleep(0.02)

    def _sweep(self) -> None:
        now = time.monotonic()
        if now - self._swept_at < _SWEEP_S:
            return
        self._swept_at = now
        old = [key for key, one in self._by_id.items() if not one.in_flight and now - one.used_at > _FORGET_S]
        for key in old:
            del self._by_id[key]
