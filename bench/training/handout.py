"""Part `handout`: samples a second through the experience store: made and put on record, handed out, committed.

64 groups of 16 attempts have ended in the ledger of a PostgreSQL that syncs to the disk, with their recorded calls in a
store of files. One sample maker reads them and writes samples, as the control worker does; then one trainer takes four
groups at a time (a minibatch of 64 trajectories), reads their arrays, and commits. Both are one process each.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from uuid import UUID

from app.artifacts import ArtifactStore, open_store
from app.experience.hand_out import Experience
from app.experience.maker import SampleMaker
from app.ledger import accept, admission, attempts, ends, experience, instances
from app.ledger.accept import NewRun
from app.ledger.database import Database
from app.ledger.ends import Finished
from app.ledger.experience import ExperienceRun
from app.ledger.instances import InstanceDemand
from app.models.endings import EndReason
from app.models.instance import InstanceMode
from app.models.kinds import Purpose
from app.models.outcome import Artifact, ArtifactKind, Verdict
from app.models.spec import Mode
from bench.control_record import Part
from bench.control_system import Say, a_spec, servers
from bench.record import row
from bench.training import recorded, workload

POLICY = "policy"
_MINIBATCH = 4
"""Groups that the trainer takes at a time."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    rounds: int = 3
    groups: int = 64
    replicas: int = 16


QUICK = Scale(rounds=1, groups=8, replicas=4)


@dataclass(frozen=True, slots=True)
class Passage:
    """One round. Seconds; `tokens` are all of the samples', prompts and answers."""

    seed: int
    samples: int
    tokens: int
    made_s: float
    handed_s: float
    bytes_kept: int


def measure(scale: Scale, say: Say) -> Part:
    """Run all rounds. Raises: MegaFlowError."""
    found: list[Passage] = []
    with servers() as held:
        store = open_store(held.stack.settings.artifacts())
        for seed in range(scale.rounds):
            say(f"round {seed + 1} of {scale.rounds}")
            with held.fresh_database() as url, closing(Database(url)) as database:
                run_id = _ended_run(database, store, scale, seed)
                found.append(_passage(database, store, run_id, scale, seed))

    def rate(figure: str) -> float:
        return median(one.samples / _took(one, figure) for one in found)

    rows = [
        row("experience: samples made and put on record", rate("made"), "samples/s"),
        row("experience: samples handed out and committed", rate("handed"), "samples/s"),
        row("experience: record, next_batch, commit, one after the other", rate("both"), "samples/s"),
        row("experience: tokens, the same", median(one.tokens / _took(one, "both") for one in found), "tokens/s"),
        row("experience: tokens of a sample", median(one.tokens / one.samples for one in found), "tokens"),
        row("experience: kept for a token", median(one.bytes_kept / one.tokens for one in found), "bytes"),
    ]
    return Part(rows, {"passages": found, "scale": scale})


def _took(one: Passage, figure: str) -> float:
    return {"made": one.made_s, "handed": one.handed_s, "both": one.made_s + one.handed_s}[figure]


def _passage(database: Database, store: ArtifactStore, run_id: UUID, scale: Scale, seed: int) -> Passage:
    experience.publish(database, POLICY, "v0")
    experience.settle(database, POLICY, "v0")
    handed = Experience(database, store, ExperienceRun(run_id, POLICY), consumer="bench")
    maker = SampleMaker(database, store, lambda _: None)
    begun = time.perf_counter()
    while maker.pass_once():
        pass
    made_s = time.perf_counter() - begun
    begun = time.perf_counter()
    samples = tokens = size = 0
    number = 0
    while (batch := handed.next_batch(_MINIBATCH)) is not None:
        for rows in batch.groups().values():
            samples += len(rows)
            tokens += sum(len(one["token_ids"]) for one in rows)
        size += len(batch.content)
        number += 1
        handed.publish(f"v{number}")
        handed.commit(batch, f"v{number}")
    handed_s = time.perf_counter() - begun
    counts = handed.counts()
    if counts.committed != scale.groups or samples != scale.groups * scale.replicas:
        raise RuntimeError(f"expected {scale.groups} committed groups, found {counts} with {samples} samples")
    return Passage(seed, samples, tokens, made_s, handed_s, size)


def _ended_run(database: Database, store: ArtifactStore, scale: Scale, seed: int) -> UUID:
    """A run whose attempts have ended with recorded calls; each group has conversations of all lengths."""
    turns = workload.load().conversations
    keys = [recorded.keep(store, f"bench/{seed}/{n}", one, "v0", n + seed) for n, one in enumerate(turns)]
    specs = [a_spec(number) for number in range(scale.groups)]
    new = NewRun(specs=specs, replicas=scale.replicas, purpose=Purpose.TRAINING)
    made = accept.accept(database, new)
    with database.begin() as connection:
        demand = InstanceDemand("process", InstanceMode.PERSISTENT, "standard", len(made.task_ids), 1, None)
        (instance_id,) = instances.request(connection, demand)
        messages = admission.admit(connection, [(task_id, Mode.PERSISTENT) for task_id in made.task_ids])
    instances.ready(database, instance_id)
    endings = []
    for number, message in enumerate(messages):
        claim = attempts.claim(database, message.message, instance_id, lease_s=600)
        if claim is None:
            raise RuntimeError("expected every attempt to be claimed")
        calls = Artifact(kind=ArtifactKind.MODEL_CALLS, key=keys[number * 7 % len(keys)])
        verdict = Verdict(reward=float(number % 3 == 0), counts=True)
        endings.append(Finished(claim, EndReason.SUBMITTED, verdict, [calls]))
    ends.finish_many(database, endings)
    return made.run_id
