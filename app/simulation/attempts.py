"""Simulates attempts: their claims, their steps, and their records in the ledger."""

from __future__ import annotations

import time
from asyncio import AbstractEventLoop
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING
from uuid import UUID

from app.errors import DatabaseUnavailable
from app.ledger import attempts, ends
from app.ledger.attempts import Claim, ClaimRequest, PhaseRecord
from app.ledger.database import Database
from app.ledger.ends import Failed, Finished
from app.models.endings import EndReason, RetryPolicy
from app.models.outcome import Artifact, ArtifactKind, Failure, Phase
from app.simulation.batches import BatchWriter, Verb
from app.simulation.instances import Attempt, Instance, RandomModel, Step
from app.simulation.links import Links

if TYPE_CHECKING:
    from app.simulation.fleet import Fleet


class Work:
    """Attempts in progress. Used on the clock's thread. `writer` must have the verbs of this class."""

    def __init__(self, clock: AbstractEventLoop, random_model: RandomModel, fleet: Fleet, counts: Counter[str]) -> None:
        self._clock = clock
        self._random_model = random_model
        self._fleet = fleet
        self._counts = counts
        self._held: dict[UUID, Attempt] = {}
        self._links = Links(clock)

    def verbs(self, database: Database, retry: RetryPolicy) -> list[Verb]:
        """Returns the writes of this class."""
        return [
            Verb(
                "phase", lambda passed: attempts.record_phases(database, [p for _, p in passed]), self._phases_written
            ),
            Verb("finish", lambda ended: ends.finish_many(database, [f for _, f in ended]), self._heard_end),
            Verb("fail", lambda ended: ends.fail_many(database, [f for _, f in ended], retry), self._heard_end),
        ]

    def start(self, writer: BatchWriter) -> None:
        """Uses this writer from now on."""
        self._writer = writer

    def __len__(self) -> int:
        return len(self._held)

    def awake(self) -> list[UUID]:
        """Returns the ids of attempts whose lease can be renewed: all on instances that are not frozen."""
        return [attempt_id for attempt_id, attempt in self._held.items() if not attempt.instance.frozen]

    def begin(self, claimed: Claim, instance: Instance) -> None:
        """Starts a claimed attempt on the instance."""
        attempt = Attempt(claimed, instance, [], self._random_model.model_calls(), begun=time.monotonic())
        instance.attempts.add(attempt)
        self._held[claimed.attempt_id] = attempt
        pull_s = self._random_model.pull_s()
        if pull_s > 0:
            self._links.follow(self._random_model.simulation)
            self._links.download(attempt, pull_s, self._pulled)
        else:
            self._plan(attempt, self._random_model.course(claimed, attempt.begun))

    def _pulled(self, attempt: Attempt, at: float) -> None:
        """Plans the attempt after its image was downloaded at `at`."""
        self._plan(attempt, self._random_model.course(attempt.claimed, at, pulled=True))

    def _plan(self, attempt: Attempt, course: list[Step]) -> None:
        attempt.course = course
        attempt.plan_s = {step.phase or step.kind: round(step.at - attempt.begun, 4) for step in course}
        self._await_next(attempt)

    def step(self, attempt: Attempt) -> None:
        """Executes the next step; postponed while its instance is frozen."""
        if attempt.over:
            return
        if attempt.instance.frozen:
            attempt.instance.missed.append(attempt)
            return
        self._take(attempt, attempt.course.pop())
        self._await_next(attempt)

    def give_back(self, instance: Instance) -> None:
        """Ends all attempts of the instance as interrupted."""
        for attempt in list(instance.attempts):
            instance.interrupted = instance.interrupted or not attempt.over
            self._fail(attempt, EndReason.INTERRUPTED, "InstanceFailed", "its simulated instance was told to stop")

    def drop(self, instance: Instance) -> None:
        """Forgets the attempts of a dead instance: it cannot report their ends."""
        for attempt in list(instance.attempts):
            self._forget(attempt)

    def cancel(self, attempt_id: UUID, reason: EndReason = EndReason.CANCELLED) -> None:
        """Stops an attempt. Does nothing if the attempt is unknown or frozen."""
        attempt = self._held.get(attempt_id)
        if attempt is not None and not attempt.instance.frozen:
            self._counts["told_to_stop"] += 1
            self._fail(attempt, reason, "Stopped", "somebody told the attempt to stop")

    def lapsed(self, attempt_id: UUID) -> None:
        """Handles a lost lease. Does nothing if the attempt has ended."""
        attempt = self._held.get(attempt_id)
        if attempt is not None and not attempt.over:
            self._refused(attempt)

    def stop_all(self) -> None:
        """Stops all attempts before their leases lapse, as no lease can be renewed; not those of frozen instances."""
        for attempt in list(self._held.values()):
            if not attempt.instance.frozen:
                self._fail(attempt, EndReason.LOST, "DatabaseUnavailable", "its lease could not be renewed")

    def _await_next(self, attempt: Attempt) -> None:
        if attempt.course:
            self._clock.call_at(attempt.course[-1].at, self.step, attempt)

    def _take(self, attempt: Attempt, step: Step) -> None:
        match step.kind:
            case "phase":
                assert step.phase is not None
                drawn = {"simulated_s": attempt.plan_s} if step.phase is Phase.AGENT_ENDED else {}
                self._writer.put("phase", (attempt, PhaseRecord(attempt.claimed, step.phase, drawn)))
            case "end":
                attempt.over = True
                calls = [Artifact(kind=ArtifactKind.MODEL_CALLS, key=key) for key in [attempt.model_calls] if key]
                finished = Finished(attempt.claimed, EndReason.SUBMITTED, self._random_model.verdict(), calls)
                self._writer.put("finish", (attempt, finished))
            case "infrastructure":
                message = "the simulated environment broke"
                self._fail(attempt, EndReason.ENVIRONMENT_ERROR, "EnvironmentFailed", message)
            case "interrupted":
                self._fleet.interrupt(attempt.instance)
            case "crash":
                self._fleet.crash(attempt.instance)
            case "vanish":
                self._fleet.vanish(attempt.instance)
            case "freeze":
                self._fleet.freeze(attempt.instance)
            case "hang":
                return  # its lease is renewed forever

    def _fail(self, attempt: Attempt, reason: EndReason, error: str, message: str) -> None:
        if not attempt.over:
            attempt.over = True
            failed = Failed(attempt.claimed, reason, Failure(error=error, message=message))
            self._writer.put("fail", (attempt, failed))

    def _phases_written(self, passed: Sequence[tuple[Attempt, PhaseRecord]], accepted: set[UUID]) -> None:
        for attempt, passage in passed:
            if passage.claimed.attempt_id not in accepted:
                self._refused(attempt)

    def _heard_end(self, ended: Sequence[tuple[Attempt, Finished | Failed]], accepted: set[UUID]) -> None:
        for attempt, end in ended:
            if end.claimed.attempt_id in accepted:
                self._counts["finished" if isinstance(end, Finished) else "failed"] += 1
                self._part(attempt)
            else:
                self._refused(attempt)

    def _refused(self, attempt: Attempt) -> None:
        """Drops the attempt: another instance has it now."""
        if attempt in attempt.instance.attempts:
            self._counts["refused"] += 1
            self._part(attempt)

    def _part(self, attempt: Attempt) -> None:
        if attempt in attempt.instance.attempts:
            self._forget(attempt)
            self._fleet.parted(attempt.instance)

    def _forget(self, attempt: Attempt) -> None:
        attempt.over = True
        attempt.instance.attempts.discard(attempt)
        if self._held.get(attempt.claimed.attempt_id) is attempt:
            del self._held[attempt.claimed.attempt_id]


class Claims:
    """Claims attempts; after an error, finds out which claims were applied nevertheless."""

    def __init__(self, database: Database, lease_s: float) -> None:
        self._database = database
        self._lease_s = lease_s
        self._in_doubt: set[ClaimRequest] = set()

    def take(self, offers: Sequence[ClaimRequest]) -> list[Claim]:
        """Claims the attempts of the messages if possible. Raises: DatabaseUnavailable: try the same offers again."""
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
        """Claims for each instance any fitting attempt; one by one, as workers do after a stale message."""
        return [attempts.claim_any(self._database, i.id, lease_s=self._lease_s) for i in asked]
