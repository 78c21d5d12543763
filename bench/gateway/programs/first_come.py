"""The gateway with the order that it is compared with: calls wait first come first served, and engines hear nothing.

python -m bench.gateway.programs.first_come     (arguments as of app.model_service.gateway)
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque

from app.model_service.gateway import __main__ as gateway
from app.model_service.gateway import congestion
from app.model_service.gateway.waiting import Place, TokenShares, WaitingLine


class FirstComeLine(WaitingLine):
    """Calls in the order in which they came."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: deque[tuple[Place, asyncio.Future[None]]] = deque()

    def add(self, place: Place, timeout_s: float) -> asyncio.Future[None]:
        admitted = super().add(place, timeout_s)
        self._calls.append((place, admitted))
        return admitted

    def admit(self) -> None:
        while self._calls:
            place, admitted = self._calls.popleft()
            if not admitted.done():
                place.charge()
                admitted.set_result(None)
                return


if __name__ == "__main__":
    congestion.__dict__["WaitingLine"] = FirstComeLine
    TokenShares.urgency = lambda self, place: 0  # type: ignore[method-assign]  # every call is as urgent as the others
    sys.exit(gateway.main())
