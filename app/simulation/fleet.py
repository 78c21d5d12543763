"""Simulates a fleet of instances: moves each through its life, in batches.

All code here runs on the thread of `Fleet.run`; other threads use `post`. An instance is a few numbers, an attempt a
list of its future steps, so ten thousand of them cost almost nothing while they wait.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

from celery import Celery

from app.ledger import instances
from app.ledger.attempts import Claim, ClaimRequest
from app.ledger.database import Database
from app.ledger.instances import INTERRUPTED_EXIT, Exit
from app.models.endings import RetryPolicy
from app.models.instance import InstanceRequest
from app.models.outcome import WakeUpMessage
from app.models.simulation import Simulation
from app.settings import Settings
from app.simulation.attempts import Claims, Work
from app.simulation.batches import BatchWriter, Verb
from app.simulation.instances import Instance, RandomModel
from app.simulation.leases import Leases, RenewalBatch
from app.simulation.slots import SlotAssignment, SlotTable
from app.stopping import StopListener

_KILLED = -9
_DEADLINES_S = 1.0
_SETTLED_S = 0.05


class Fleet:
    """All instances of one host, with their slots and attempts."""

    def __init__(self, settings: Settings, celery: Celery, simulation: Simulation) -> None:
        self._settings = settings
        self._database = Database(settings.database(), pool_size=3)
        self._retry = RetryPolicy(settings.retry_base_s, settings.retry_cap_s)
        self._random_model = RandomModel(simulation)
        self._numbers = itertools.count(1)
        self._clock = asyncio.new_event_loop()
        self._clock.set_exception_handler(_broken)
        self.post = self._clock.call_soon_threadsafe
        self._instances: dict[UUID, Instance] = {}
        self._slots = SlotTable(celery, lambda queue, messages: self.post(self._take_messages, queue, messages))
        self._leaving: dict[UUID, str] = {}  # handles of instances whose end is not yet in the ledger
        self._counts: Counter[str] = Counter()
        self._stopping = self._closed = False
        self.work = Work(self._clock, self._random_model, self, self._counts)
        self._leases = Leases(self._database, settings, self._clock, self)
        self._claims = Claims(self._database, settings.lease_s)
        self._intake = BatchWriter("intake", self._intake_verbs(), self.post)
        self._fallback = BatchWriter("fallback", [Verb("claim_any", self._claims.take_any, self._heard_any)], self.post)
        self._outcomes = BatchWriter("outcomes", self._outcome_verbs(), self.post)
        threading.Thread(target=self._hear_stops, name="stops", daemon=True).start()

    # --- The loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs until `stop` was called and all instances have ended in the ledger."""
        self.work.start(self._outcomes)
        self._leases.start(self._outcomes)
        self._enforce_deadlines()
        self._clock.run_until_complete(self._until_settled())
        self._close()

    async def _until_settled(self) -> None:
        settled = 0
        while settled < 2:  # twice: at the first look, answers of the writers may be due
            await asyncio.sleep(_SETTLED_S)
            settled = settled + 1 if self._stopping and self._settled() else 0

    def stop(self) -> None:
        """Makes every instance give its attempts back and exit. On the fleet's thread only."""
        self._stopping = True
        for instance in list(self._instances.values()):
            self.interrupt(instance)

    def _settled(self) -> bool:
        return not self._instances and all(writer.idle() for writer in (self._intake, self._fallback, self._outcomes))

    def _close(self) -> None:
        self._slots.close()
        self._closed = True
        for writer in (self._intake, self._fallback, self._outcomes):
            writer.close()
        self._database.close()

    def _hear_stops(self) -> None:
        listener = StopListener(self._settings)
        while not self._closed:
            for attempt_id in listener.listen(1.0):
                self.post(self.work.cancel, attempt_id)
        listener.close()

    def counts(self) -> dict[str, float]:
        """Returns counts of actions so far, by name; `…_s`: seconds spent in the ledger."""
        verbs = {**self._intake.verbs, **self._fallback.verbs, **self._outcomes.verbs}
        took = {f"{name}_s": round(verb.took_s, 3) for name, verb in verbs.items()}
        rows = {f"{name}_rows": verb.rows for name, verb in verbs.items()}
        self._counts["renewals"] = self._leases.renewed
        return {**self._counts, **rows, **took, "instances": len(self._instances), "attempts": len(self.work)}

    def behave(self, simulation: Simulation) -> None:
        """Uses `simulation` for everything that begins from now on."""
        self._random_model.follow(simulation)

    # --- What the provider does -------------------------------------------------------------------------------------

    def launch(self, requests: Sequence[InstanceRequest]) -> dict[UUID, str]:
        """Creates instances; safe to call twice."""
        handles = {request.instance_id: self._make(request) for request in requests if not self._stopping}
        return {instance_id: handle for instance_id, handle in handles.items() if handle is not None}

    def _make(self, request: InstanceRequest) -> str | None:
        known = self._instances.get(request.instance_id)
        if known is not None:
            return known.handle
        if self._random_model.strikes("launch_throttled"):
            return None
        lifetime_s = math.inf if request.lifetime_s is None else request.lifetime_s
        instance = Instance(request, f"simulated-{next(self._numbers)}", time.monotonic() + lifetime_s)
        self._instances[instance.id] = instance
        self._counts["launched"] += 1
        match self._random_model.birth():
            case "boot_failure":
                self._clock.call_later(
                    self._random_model.draw("boot_s"), self._leave, instance, 1, "exit code 1 while it booted"
                )
            case "never_registers":
                self._counts["never_registered"] += 1
            case _:
                self._clock.call_later(self._random_model.draw("boot_s"), self._booted, instance)
        return instance.handle

    def terminate(self, instance_id: UUID, grace_s: float) -> None:
        """Ends an instance at once, or lets it finish its attempts within `grace_s`."""
        instance = self._instances.get(instance_id)
        if instance is None:
            return
        if grace_s > 0 and not instance.frozen:
            self._drain(instance)
            self._clock.call_later(grace_s, self.interrupt, instance)
        else:
            self._die(instance, "killed by SIGKILL")

    def alive(self) -> dict[UUID, str]:
        """Returns all instances, including those whose end is not yet in the ledger: their end must not be guessed."""
        return self._leaving | {instance.id: instance.handle for instance in self._instances.values()}

    # --- An instance's life -----------------------------------------------------------------------------------------

    def _booted(self, instance: Instance) -> None:
        if not instance.gone:
            self._intake.put("ready", instance)

    def _heard_ready(self, booted: Sequence[Instance], expected: set[UUID]) -> None:
        for instance in booted:
            if instance.gone:
                continue
            if instance.id not in expected:
                self._leave(instance, 0, "nobody expected it")
                continue
            self._counts["ready"] += 1
            self._open(instance, instance.request.slots)
            if instance.ephemeral:
                self._idle_at(instance)

    def _idle_at(self, instance: Instance) -> None:
        self._clock.call_later(self._settings.ephemeral_idle_s, self._idled, instance)

    def _idled(self, instance: Instance) -> None:
        if instance.gone or instance.attempts:
            return
        if instance.offered:
            self._idle_at(instance)
        else:
            self._leave(instance, 0, "nothing to do")

    def _drain(self, instance: Instance) -> None:
        """Stops new work; the instance exits when its work is finished."""
        instance.draining = True
        self._slots.shut(instance)
        self._leave_if_done(instance)

    def interrupt(self, instance: Instance) -> None:
        """Makes the instance give all its work back and exit."""
        if instance.gone:
            return
        self.work.give_back(instance)
        self._drain(instance)

    def _leave_if_done(self, instance: Instance) -> None:
        if instance.draining and not instance.gone and not instance.attempts and not instance.offered:
            code = INTERRUPTED_EXIT if instance.interrupted else 0
            self._leave(instance, code, f"exit code {code}")

    def _enforce_deadlines(self) -> None:
        self._clock.call_later(_DEADLINES_S, self._enforce_deadlines)
        now = time.monotonic()
        for instance in [instance for instance in self._instances.values() if instance.ends_at < now]:
            self._die(instance, "killed at its deadline")

    def crash(self, instance: Instance) -> None:
        self._counts["crashed"] += 1
        self._die(instance, "killed by SIGKILL")

    def parted(self, instance: Instance) -> None:
        """Handles the end of an attempt: an ephemeral instance exits, a standing one has a free slot again."""
        instance.draining = instance.draining or instance.ephemeral
        if instance.draining:
            self._leave_if_done(instance)
        elif not instance.frozen:
            self._open(instance, 1)

    def _die(self, instance: Instance, why: str) -> None:
        self._leave(instance, _KILLED, why)

    def _leave(self, instance: Instance, code: int, why: str) -> None:
        """Ends the instance; its provider reports it."""
        if self._remove(instance):
            self._counts["exited"] += 1
            self._leaving[instance.id] = instance.handle
            self._outcomes.put("exit", Exit(instance.id, code, why))

    def _heard_exits(self, gone: Sequence[Exit], _: set[UUID]) -> None:
        for instance in gone:
            self._leaving.pop(instance.instance_id, None)

    def vanish(self, instance: Instance) -> None:
        """Removes the instance without a report."""
        if self._remove(instance):
            self._counts["vanished"] += 1

    def _remove(self, instance: Instance) -> bool:
        if instance.gone:
            return False
        instance.gone = True
        self._slots.shut(instance)
        self._instances.pop(instance.id, None)
        self.work.drop(instance)
        return True

    def freeze(self, instance: Instance) -> None:
        if not instance.frozen and not instance.gone:
            self._counts["frozen"] += 1
            instance.frozen = True
            self._slots.shut(instance)
            self._clock.call_later(self._random_model.draw("freeze_s"), self._thaw, instance)

    def _thaw(self, instance: Instance) -> None:
        instance.frozen = False
        missed, instance.missed = instance.missed, []
        for attempt in missed:
            self.work.step(attempt)
        if not instance.ephemeral and not instance.gone and not instance.draining:
            self._open(instance, instance.request.slots - len(instance.attempts) - instance.offered)

    # --- Slots and messages ---------

    def _open(self, instance: Instance, slots: int) -> None:
        self._claim_for(self._slots.open(instance, slots))

    def _take_messages(self, queue: str, messages: Sequence[WakeUpMessage]) -> None:
        self._counts["messages"] += len(messages)
        self._claim_for(self._slots.assign(queue, messages))

    def _claim_for(self, assigned: Iterable[SlotAssignment]) -> None:
        for instance, message in assigned:
            instance.offered += 1
            self._intake.put("claim", ClaimRequest(message, instance.id))

    def _heard_claims(self, offers: Sequence[ClaimRequest], claims: Sequence[Claim]) -> None:
        won = {(claim.attempt_id, claim.instance_id): claim for claim in claims}
        for offer in offers:
            instance = self._instances.get(offer.instance_id)
            claimed = won.pop((offer.message.attempt_id, offer.instance_id), None)
            self._counts["stale_hints"] += claimed is None
            if instance is None:
                continue  # it ended in the meantime; its exit returns the attempt
            if claimed is None and not instance.draining:
                self._fallback.put("claim_any", instance)
            else:
                self._answered(instance, claimed)

    def _heard_any(self, asked: Sequence[Instance], claims: Sequence[Claim | None]) -> None:
        """Handles claims after stale messages; an ephemeral instance without a claim exits."""
        for instance, claimed in zip(asked, claims, strict=True):
            instance.draining = instance.draining or (instance.ephemeral and claimed is None)
            if not instance.gone:
                self._answered(instance, claimed)

    def _answered(self, instance: Instance, claimed: Claim | None) -> None:
        instance.offered -= 1
        if claimed is not None:
            self._counts["claimed"] += 1
            self.work.begin(claimed, instance)
            if instance.draining:
                self.interrupt(instance)
        elif not instance.draining and not instance.frozen:
            self._open(instance, 1)
        else:
            self._leave_if_done(instance)

    # --- Leases -----------------------------------------------------------------------------------------------------

    def in_hand(self) -> RenewalBatch:
        """Returns the leases and heartbeats to renew now: all of instances that are not frozen."""
        standing = [i.id for i in self._instances.values() if not i.ephemeral and not i.frozen]
        return RenewalBatch(self.work.awake(), standing)

    def drain(self, instance_id: UUID) -> None:
        if instance_id in self._instances:
            self._drain(self._instances[instance_id])

    def closed(self, instance_id: UUID) -> None:
        if instance_id in self._instances:
            self._leave(self._instances[instance_id], 0, "its row is closed")

    def orphaned(self) -> None:
        for instance in list(self._instances.values()):
            self._leave(instance, 1, "its control plane is gone")

    # --- The ledger -------------------------------------------------------------------------------------------------

    def _intake_verbs(self) -> list[Verb]:
        database = self._database
        return [
            Verb("ready", lambda booted: instances.ready_many(database, [i.id for i in booted]), self._heard_ready),
            Verb("claim", self._claims.take, self._heard_claims),
        ]

    def _outcome_verbs(self) -> list[Verb]:
        database, retry = self._database, self._retry
        return [
            self._leases.verb,
            *self.work.verbs(database, retry),
            Verb("exit", lambda gone: instances.exited_many(database, gone, retry), self._heard_exits),
        ]


def _broken(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Ends the fleet at an error of its own code: its instances must not go on half alive."""
    loop.default_exception_handler(context)
    loop.stop()
