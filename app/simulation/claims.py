"""Claims attempts for simulated instances, on the writers' threads."""

from __future__ import annotations

from collections.abc import Sequence

from app.errors import DatabaseUnavailable
from app.ledger import attempts
from app.ledger.attempts import Claim, ClaimRequest
from app.ledger.database import Database
from app.simulation.instances import Instance


class Claims:
    """Takes attempts; after an error, asks what was taken all the same."""

    def __init__(self, database: Database, lease_s: float) -> None:
        self._database = database
        self._lease_s = lease_s
        self._in_doubt: set[ClaimRequest] = set()

    def take(self, offers: Sequence[ClaimRequest]) -> list[Claim]:
        """What the messages name, as far as it can be had. Raises: DatabaseUnavailable: try the same offers again."""
        try:
            claims = attempts.claim_many(self._database, offers, lease_s=self._lease_s)
        except DatabaseUnavailable:
            self._in_doubt.update(offers)
            raise
        had = {claim.attempt_id for claim in claims}
        for offer in self._in_doubt.intersection(offers):
            if offer.message.attempt_id not in had:
                held = attempts.held_by(self._database, offer.instance_id)
                claims += [claim for claim in held if claim.attempt_id == offer.message.attempt_id]
        self._in_doubt.difference_update(offers)
        return claims

    def take_any(self, asked: Sequence[Instance]) -> list[Claim | None]:
        """For each, whatever waits for one like it; one by one, as workers do it after a stale message."""
        return [attempts.claim_any(self._database, i.id, lease_s=self._lease_s) for i in asked]
