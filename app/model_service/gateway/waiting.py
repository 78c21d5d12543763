"""The order in which calls wait for an engine that is full.

Users are ordered by tokens: a user more than `DEFICIT` ahead of the one with the least waits for the others. Among the
other calls, the attempt with the least time at engines goes first, by levels of seconds that double: an attempt with
few turns overtakes long ones. Within a level the older attempt goes first, so that an engine's cache serves one
conversation after the other instead of all in turns. A call that has waited for half of its time goes first of all.
Engines with a priority field get both, for the calls in their own queues.
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
"""Tokens that a user may be ahead of another user who waits."""
_SAVED = 2 * DEFICIT
"""Maximum credit in tokens of a user without calls: the lead that the others may have, plus a call."""
_IDLE_S = 60.0
"""Seconds without a call after which a user is forgotten."""
_OVERDUE_SHARE = 0.5


def level_of(attained_s: float) -> int:
    """Returns 0 for an attempt with less than a second at engines, and one more for each doubling of that time."""
    return int(max(0.0, attained_s) / LEVEL_S).bit_length()


@dataclass(slots=True, eq=False)
class TokenShare:
    """Tokens of one user at one model, counted from the user's starting value."""

    tokens: int = 0
    calls: int = 0  # waiting, or at an engine
    used_at: float = field(default_factory=time.monotonic)

    @property
    def idle(self) -> bool:
        return not self.calls and time.monotonic() - self.used_at > _IDLE_S


@dataclass(slots=True, eq=False)
class Place:
    """Place of one call in the order. `charge` at each entry to an engine, `settle` when its tokens are known."""

    model: str = ""
    share: TokenShare = field(default_factory=TokenShare)
    level: int = 0
    began: float = 0.0  # start of its attempt
    tokens: int = 0  # an estimate
    charged: int = 0

    def charge(self) -> None:
        self.share.tokens += self.tokens - self.charged
        self.charged = self.tokens

    def settle(self, tokens: int) -> None:
        self.share.tokens += tokens - self.charged
        self.charged = tokens


class TokenShares:
    """Token shares of users by model; replicas of a model share them. For one event loop.

    A user without calls saves little credit. A new user starts with the least tokens of the users with calls.

    Source: Sheng et al.: Fairness in Serving Large Language Models (2024), the lift of the virtual token counter.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], TokenShare] = {}
        self._least: dict[str, int] = {}  # by model: least tokens of users with calls; it never falls

    def place(self, model: str, user: str, *, level: int, began: float, tokens: int) -> Place:
        """Creates the place of a call that begins. Release it by `leave`."""
        share = self._known.get((model, user))
        if share is None:
            self._known = {key: one for key, one in self._known.items() if not one.idle}
            share = self._known[model, user] = TokenShare(self._reach(model))
        elif not share.calls:
            share.tokens = max(share.tokens, self._reach(model) - _SAVED)
        share.calls += 1
        return Place(model, share, level, began, tokens)

    def urgency(self, place: Place) -> int:
        """Returns the rank in an engine's queue, 0 first: the attempt's level, plus the user's lead in `DEFICIT`s."""
        return place.level + max(0, place.share.tokens - self._reach(place.model)) // DEFICIT

    def _reach(self, model: str) -> int:
        with_calls = [one.tokens for (name, _), one in self._known.items() if name == model and one.calls]
        self._least[model] = max(self._least.get(model, 0), min(with_calls, default=0))
        return self._least[model]

    def leave(self, place: Place, tokens: int | None) -> None:
        """Handles the end of a call. tokens: its actual tokens; None: as estimated."""
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
    """Queue of calls for one engine. A call that gave up, by cancelling its future, is skipped."""

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
        """Adds a call to the queue. The returned future is done when the call may continue."""
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        overdue_at = time.monotonic() + timeout_s * _OVERDUE_SHARE
        waiting = _Waiting(place.level, place.began, next(self._numbers), place, overdue_at, admitted)
        heapq.heappush(self._by_share.setdefault(place.share, []), waiting)
        self._by_age.append(waiting)
        return admitted

    def admit(self) -> None:
        """Admits the next call, if there is one."""
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
