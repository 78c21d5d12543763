"""The order in which calls wait for an engine that is full.

Among users by tokens: a user who is more than `DEFICIT` ahead of the one with the least waits for the others. Among
the calls of the rest, those of the attempt that has had the least of engines go first, by levels of seconds that
double: an attempt with few turns passes the long ones. Within a level the older attempt goes first, so that an engine's
cache serves one conversation after the other instead of all in turns. A call that has waited for half of its time goes
before all. Engines that take a priority are told of both, for the calls that wait in them.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import count

LEVEL_S = 1.0
DEFICIT = 1_000_000
"""Tokens that a user may be ahead of another one who waits."""
_SAVED = 2 * DEFICIT
"""The most that a user without calls saves up: as far as the others may come ahead, and a call."""
_IDLE_S = 60.0
"""After this time without a call nothing is known of a user."""
_OVERDUE_SHARE = 0.5


def level_of(attained_s: float) -> int:
    """0 for an attempt whose calls were at engines for less than a second, one more whenever that has doubled."""
    return int(max(0.0, attained_s) / LEVEL_S).bit_length()


@dataclass(slots=True, eq=False)
class TokenShare:
    """What one user has had of one model, counted from where the user began."""

    tokens: int = 0
    calls: int = 0  # that wait, or are at an engine
    used_at: float = field(default_factory=time.monotonic)

    @property
    def idle(self) -> bool:
        return not self.calls and time.monotonic() - self.used_at > _IDLE_S


@dataclass(slots=True, eq=False)
class Place:
    """One call's place in the order. `charge` at each entry to an engine, `settle` when it is known what it took."""

    model: str = ""
    share: TokenShare = field(default_factory=TokenShare)
    level: int = 0
    began: float = 0.0  # of its attempt
    tokens: int = 0  # an estimate
    charged: int = 0

    def charge(self) -> None:
        self.share.tokens += self.tokens - self.charged
        self.charged = self.tokens

    def settle(self, tokens: int) -> None:
        self.share.tokens += tokens - self.charged
        self.charged = tokens


class TokenShares:
    """Users by model; replicas of a model share them. For one event loop.

    A user without calls saves up little; a new one begins level with the least of those who have some.

    Source: Sheng et al.: Fairness in Serving Large Language Models (2024), the lift of the virtual token counter.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], TokenShare] = {}
        self._least: dict[str, int] = {}  # by model, of those with calls; it never falls

    def place(self, model: str, user: str, *, level: int, began: float, tokens: int) -> Place:
        """For a call that begins. Give it back by `leave`."""
        share = self._known.get((model, user))
        if share is None:
            self._known = {key: one for key, one in self._known.items() if not one.idle}
            share = self._known[model, user] = TokenShare(self._reach(model))
        elif not share.calls:
            share.tokens = max(share.tokens, self._reach(model) - _SAVED)
        share.calls += 1
        return Place(model, share, level, began, tokens)

    def urgency(self, place: Place) -> int:
        """For an engine's queue, 0 first: the attempt's level, plus one for each `DEFICIT` that the user is ahead."""
        return place.level + max(0, place.share.tokens - self._reach(place.model)) // DEFICIT

    def _reach(self, model: str) -> int:
        with_calls = [one.tokens for (name, _), one in self._known.items() if name == model and one.calls]
        self._least[model] = max(self._least.get(model, 0), min(with_calls, default=0))
        return self._least[model]

    def leave(self, place: Place, tokens: int | None) -> None:
        """The call has ended. tokens: what it took; None: as estimated."""
        place.settle(place.charged if tokens is None else tokens)
        self._reach(place.model)
        place.share.calls -= 1
        place.share.used_at = time.monotonic()


@dataclass(order=True, slots=True)
class _Waiting:
    level: int
    began: float
    number: int
    place: Place = field(compare=False)
    overdue_at: float = field(compare=False)
    admitted: asyncio.Future[None] = field(compare=False)


class WaitingLine:
    """The calls that wait for one engine. One that gave up, by cancelling its future, is passed over."""

    def __init__(self) -> None:
        self._by_share: dict[TokenShare, list[_Waiting]] = {}
        self._by_age: deque[_Waiting] = deque()
        self._numbers = count()

    def __len__(self) -> int:
        return sum(not one.admitted.done() for one in self._by_age)

    def __bool__(self) -> bool:
        while self._by_age and self._by_age[0].admitted.done():
            self._by_age.popleft()
        return bool(self._by_age)

    def add(self, place: Place, timeout_s: float) -> asyncio.Future[None]:
        """A place at the end of the line; the future is done when the call may go on."""
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        overdue_at = time.monotonic() + timeout_s * _OVERDUE_SHARE
        waiting = _Waiting(place.level, place.began, next(self._numbers), place, overdue_at, admitted)
        heapq.heappush(self._by_share.setdefault(place.share, []), waiting)
        self._by_age.append(waiting)
        return admitted

    def admit(self) -> None:
        """Let the next one go on, if there is one."""
        if not self:
            return
        first = self._by_age[0]
        if time.monotonic() < first.overdue_at:
            heads = self._heads()
            least = min(one.place.share.tokens for one in heads)
            first = min(one for one in heads if one.place.share.tokens <= least + DEFICIT)
        first.place.charge()
        first.admitted.set_result(None)

    def _heads(self) -> list[_Waiting]:
        for share, line in list(self._by_share.items()):
            while line and line[0].admitted.done():
                heapq.heappop(line)
            if not line:
                del self._by_share[share]
        return [line[0] for line in self._by_share.values()]
