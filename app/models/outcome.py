"""Defines the outcome of an attempt: phases, verdict, artifacts, and the result for a client."""

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
    """Phases of an attempt; it stores the time of reaching each."""

    ACCEPTED = "accepted"
    ADMITTED = "admitted"
    INSTANCE_READY = "instance_ready"
    CLAIMED = "claimed"  # a worker on a ready instance has claimed it
    IMAGE_READY = "image_ready"
    ENVIRONMENT_READY = "environment_ready"
    AGENT_STARTED = "agent_started"
    AGENT_ENDED = "agent_ended"
    GRADING_QUEUED = "grading_queued"  # graded separately: the agent's files are stored, the slot is free
    GRADING_STARTED = "grading_started"  # a grader has claimed it
    GRADED = "graded"
    STORED = "stored"
    TORN_DOWN = "torn_down"


class TestStatus(StrEnum):
    __test__ = False
    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    SKIPPED = "skipped"
    MISSING = "missing"  # not in the report


MOST_REWARD = 1e6
"""Limit of a reward's absolute value; a larger reward is a fault of the grading."""
Reward = Annotated[float, Field(ge=-MOST_REWARD, le=MOST_REWARD, allow_inf_nan=False)]


SaidText = Annotated[str, BeforeValidator(lambda value: plain_text(value) if isinstance(value, str) else value)]
"""Text that may come from a task; characters that PostgreSQL cannot store are replaced."""


class Verdict(Wire):
    """Outcome of grading. `counts` is False when not scored: then `reward` is None, never 0.

    A suspect verdict has no reward above 0: a named rule detected that the graded state could have changed its own
    grading.
    """

    reward: Reward | None
    counts: bool
    detail: SaidText = ""
    tests: dict[SaidText, TestStatus] = {}
    metrics: dict[SaidText, Reward] = {}
    suspect: SaidText = ""  # the rule that detected it; empty: not suspect
    claimed_reward: Reward | None = None  # of a suspect verdict: the reward by the grading
    grader: SaidText = ""  # name and version of the grader
    regraded_at: datetime | None = None  # time of a new grading from the stored test report
    previous: tuple[Verdict, ...] = ()  # of a regraded verdict: earlier verdicts, oldest first

    def suspected(self, rule: str) -> Verdict:
        """Returns a suspect copy: reward 0, old reward as claim. Unchanged without a rule or if already suspect."""
        if not rule or self.reward is None or self.suspect:
            return self
        return self.model_copy(update={"reward": min(0.0, self.reward), "suspect": rule, "claimed_reward": self.reward})

    def ruled(self, reward: float | None) -> Verdict:
        """Returns the verdict with the reward of the run's rule; unchanged without a rule.

        A suspect verdict gets the lower of its own reward and the rule's: it must not avoid a penalty.
        """
        if reward is None or self.reward is None or (self.suspect and reward >= self.reward):
            return self
        detail = f"{self.detail}; the run's rule gives {reward:g} to this end, its tests gave {self.reward:g}"
        metrics = {**self.metrics, "graded_reward": self.reward}
        return self.model_copy(update={"reward": reward, "detail": detail, "metrics": metrics})

    def after(self, before: Verdict, at: datetime) -> Verdict:
        """Returns this verdict as a regrade of `before`, with the earlier verdicts."""
        previous = (*before.previous, before.model_copy(update={"previous": ()}))
        return self.model_copy(update={"regraded_at": at, "previous": previous})

    @property
    def resolved(self) -> bool:
        return self.counts and self.reward is not None and self.reward >= 1.0


class ArtifactKind(StrEnum):
    PATCH = "patch"
    TRAJECTORY = "trajectory"  # ATIF: one schema for all agents, built from the gateway's record
    MODEL_CALLS = "model_calls"  # every call unchanged, for replay and training (JSON lines, zstd)
    AGENT_FILES = "agent_files"  # the framework's own trajectory, state and configuration (tar, zstd)
    AGENT_LOG = "agent_log"
    TEST_REPORT = "test_report"
    VERDICT = "verdict"
    ENVIRONMENT_LOG = "environment_log"  # logs of its other services, and its network requests
    HANDED_OVER = "handed_over"  # files for a separate verifier; only of attempts with one
    TERMINAL = "terminal"  # recording of commands in the environments for a player (asciicast, version 2)
    STEP_DIFFS = "step_diffs"  # the repository's diff after each step, if the run has `record_diffs` (JSON lines)
    COMMAND_LOGS = "command_logs"  # full text of the shortened outputs (tar, zstd)


class Artifact(Wire):
    """Content in the store, or a record that there is none (`missing` is the reason)."""

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
    phase: Phase | None = None  # the last phase reached


class AttemptRecord(Wire):
    """Record of one attempt at a task."""

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
    """Result for a waiting client: the task's end and all its attempts."""

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
    scripted: bool = False  # the graded attempt was scripted: its reward does not measure the model
    failure: Failure | None = None
    attempts: tuple[AttemptRecord, ...] = Field(default=())

    @property
    def attempt(self) -> AttemptRecord | None:
        """The last attempt; None: no attempt was dispatched."""
        return self.attempts[-1] if self.attempts else None

    @property
    def reward(self) -> float | None:
        """The reward; None: not scored."""
        return self.verdict.reward if self.verdict else None

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        return self.attempt.artifacts if self.attempt else ()


class StoredPath(Wire):
    """File, or folder as a tar, of the agent's environment for a separate verifier, with its size in the bundle."""

    path: str
    is_folder: bool
    size_bytes: int


class AgentResult(Wire):
    """Result of an agent for grading by another worker. Keys are keys in the artifact store."""

    end_reason: EndReason
    patch: str | None = None  # key
    bundle: str | None = None  # key; the contents of `paths`, one after the other
    paths: tuple[StoredPath, ...] = ()
    command_logs: str | None = None  # key
    command_log_count: int = 0
    terminal: str | None = None  # key


class WakeUpMessage(Wire):
    """Full body of an `attempt.run` or `grading.run` message. Lost, duplicate or late messages do no harm."""

    attempt_id: UUID
    number: int
