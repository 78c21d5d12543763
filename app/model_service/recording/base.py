"""The contract between the gateway and whoever keeps what it saw."""

from __future__ import annotations

from typing import Protocol
from uuid import UUID

from app.models.model_calls import Account, Exchange, ModelSession, TokenUse


class Recorder(Protocol):
    """Keeps calls, and keeps accounts of them. For one event loop."""

    async def account(self, session: ModelSession) -> Account:
        """What the attempt has had so far; read from the ledger at first sight, then kept up here.

        Raises: DatabaseUnavailable: at first sight only.
        """
        ...

    async def run_spend(self, session: ModelSession) -> tuple[float, float | None]:
        """US dollars that the session's run has spent, and may spend (None: not bounded, nothing is added up).

        What was recorded here counts at once, what other gateways recorded within seconds.
        """
        ...

    def record(self, exchange: Exchange) -> TokenUse:
        """Keep a call. The account counts it at once; what was said is written soon, in batches, off the loop's way.

        Never raises: what cannot be read is kept as it is. While the ledger is away, calls are kept back up to a bound
        of bytes, then the oldest bodies are given up (their rows stay).
        """
        ...

    async def flush(self, attempt_id: UUID) -> None:
        """Until all calls of the attempt are in the ledger. Raises: DatabaseUnavailable."""
        ...

    def forget(self, attempt_id: UUID) -> None:
        """The attempt has ended: its account need not be kept at hand any more."""
        ...

    async def close(self) -> None:
        """Write what is left and stop."""
        ...
