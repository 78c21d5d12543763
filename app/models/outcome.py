"""The outcome of an attempt: phases, verdict, artifacts, and the result that a client gets."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any
from uuid import UUID

from pydantic import BeforeValidator, Field

from app.models.endings import EndReason
from app.models.spec import Mode, Wire, plain_text
from app.models.states import AttemptState, TaskState


class Phase(StrEnum):
    """The phases of an attempt, which stores the time at which it reached each."""

    ACCEPTED = "accepted"
    ADMITTED = "admitted"
    INSTANCE_READY = "instance_ready"
    CLAIMED = "claimed"  # a worker on a ready instance has it
    IMAGE_READY = "image_ready"
    ENVIRONMENT_READY = "environment_ready"
    AGENT_STARTED = "agent_started"
    AGENT_ENDED = "agent_ended"
    GRADING_QUEUED = "grading_queued"  # graded apart: what the agent left is stored, and its slot is free
    GRADING_STARTED = "grading_started"  # a grader has it
    GRADED = "graded"
    STORED = "stored"
    TORN_DOWN = "torn_down"


class TestStatus(StrEnum):
    __test__ = False
    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    SKIPPED = "skipped"
    MISSING = "missing"  # the report does not name it


MOST_REWARD = 1e6
"""Of a reward's absolute value; more is no score but a fault of the grading."""
Reward = Annotated[float, Field(ge=-MOST_REWARD, le=MOST_REWARD, allow_inf_nan=False)]


SaidText = Annotated[str, BeforeValidator(lambda value: plain_text(value) if isinstance(value, str) else value)]
"""What a task may have said: what PostgreSQL cannot hold in it is replaced."""


class Verdict(Wire):
    """The outcome of grading. `counts` is False when nothing was scored: then `reward` is None, never 0.

    A suspect verdict has no reward above 0: a named rule found that the graded state could have changed its own
    judgement.
    """

    reward: Reward | None
    counts: bool
    detail: SaidText = ""
    tests: dict[SaidText, TestStatus] = {}
    metrics: dict[SaidText, Reward] = {}
    suspect: SaidText = ""  # the rule that found it; empty: none did
    claimed_reward: Reward | None = None  # of a suspect verdict: what the grading would have given
    grader: SaidText = ""  # who judged, with its version
    regraded_at: datetime | None = None  # then it was judged again, from the kept test report
    previous: tuple[Verdict, ...] = ()  # of a regraded verdict: those before it, the oldest first

    def suspected(self, rule: str) -> Verdict:
        """The verdict with the reward 0 and its reward as a claim; as it is without a rule, or when it is suspect."""
        if not rule or self.reward is None or self.suspect:
            return self
        return self.model_copy(update={"reward": min(0.0, self.reward), "suspect": rule, "claimed_reward": self.reward})

    def ruled(self, reward: float | None) -> Verdict:
        """The verdict with the reward that a rule of the run gives; as it is without one.

        One that is suspect gets the lower of its own and the rule's: being suspect saves from no penalty.
        """
        if reward is None or self.reward is None or (self.suspect and reward >= self.reward):
            return self
        detail = f"{self.detail}; the run's rule gives {reward:g} to this end, its tests gave {self.reward:g}"
        metrics = {**self.metrics, "graded_reward": self.reward}
        return self.model_copy(update={"reward": reward, "detail": detail, "metrics": metrics})

    def after(self, before: Verdict, at: datetime) -> Verdict:
        """The verdict as a regrade's, with all that stood before it."""
        previous = (*before.previous, before.model_copy(update={"previous": ()}))
        return self.model_copy(update={"regraded_at": at, "previous": previous})

    @property
    def resolved(self) -> bool:
        return self.counts and self.reward is not None and self.reward >= 1.0


class ArtifactKind(StrEnum):
    PATCH = "patch"
    TRAJECTORY = "trajectory"  # ATIF: one schema for all agents, made from what the gateway recorded
    MODEL_CALLS = "model_calls"  # every call as it was, for replay and training (JSON lines, zstd)
    AGENT_FILES = "agent_files"  # the framework's own trajectory, state and configuration (tar, zstd)
    AGENT_LOG = "agent_log"
    TEST_REPORT = "test_report"
    VERDICT = "verdict"
    ENVIRONMENT_LOG = "environment_log"  # what its other services wrote, and whom it asked for what on the network
    HANDED_OVER = "handed_over"  # what a verifier apart gets of the agent's environment; of such attempts alone
    TERMINAL = "terminal"  # what was run in the environments, as a recording for a player (asciicast, version 2)
    STEP_DIFFS = "step_diffs"  # the repository's diff after each step, of runs that ask for it (JSON lines)
    COMMAND_LOGS = "command_logs"  # all of the outputs that were handed on without their middle (tar, zstd)


class Artifact(Wire):
    """Bytes in the store, or the recorded fact that there are none (`missing` says why)."""

    kind: ArtifactKind
    key: str | None = None
    url: str | None = None
    size_bytes: int | None = None
    sha256: str | None = None
    missing: str | None = None


class Failure(Wire):
    """A fault as data, recorded once, on the attempt."""

    error: str  # the class of app.errors
    message: SaidText
    phase: Phase | None = None  # the last that was reached


class AttemptRecord(Wire):
    """One try at a task, as kept."""

    id: UUID
    number: int
    state: AttemptState
    mode: Mode
    instance_id: UUID | None = None
    instance: str | None = None  # provider and handle, for a person
    environment: dict[str, Any] = {}  # container id, origin (fresh | recycled), image
    end_reason: EndReason | None = None
    failure: Failure | None = None
    verdict: Verdict | None = None
    scripted: bool = False  # a replay engine answered at least one of its model calls
    phases: dict[Phase, datetime] = {}
    artifacts: tuple[Artifact, ...] = ()


class TaskResult(Wire):
    """What a waiting client gets: the task's end and everything that led there."""

    task_id: UUID
    run_id: UUID
    name: str
    replica: int = 0
    agent: str
    model: str | None = None  # as submitted; None: the agent has none
    mode: Mode
    state: TaskState
    end_reason: EndReason | None = None
    verdict: Verdict | None = None
    scripted: bool = False  # the graded attempt was: its reward says nothing about the model
    failure: Failure | None = None
    attempts: tuple[AttemptRecord, ...] = Field(default=())

    @property
    def attempt(self) -> AttemptRecord | None:
        """The last attempt, or None when none was dispatched."""
        return self.attempts[-1] if self.attempts else None

    @property
    def reward(self) -> float | None:
        """None when not scored."""
        return self.verdict.reward if self.verdict else None

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        return self.attempt.artifacts if self.attempt else ()


class StoredPath(Wire):
    """What a verifier apart gets of the agent's environment: a file, or a folder as a tar; its place in the bundle."""

    path: str
    is_folder: bool
    size_bytes: int


class AgentResult(Wire):
    """What an agent left to be graded by another worker. Keys are of the artifact store."""

    end_reason: EndReason
    patch: str | None = None  # key
    bundle: str | None = None  # key; the contents of `paths`, one after the other
    paths: tuple[StoredPath, ...] = ()
    command_logs: str | None = None  # key
    command_log_count: int = 0
    terminal: str | None = None  # key


class WakeUpMessage(Wire):
    """The whole body of an `attempt.run` or `grading.run` message. It may be lost, doubled or late without harm."""

    attempt_id: UUID
    number: int
