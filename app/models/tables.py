"""The tables of PostgreSQL.

Invariants are indexes and triggers here, not habits of the code: one live attempt per task, one attempt per ephemeral
instance, one firing per schedule and due time, one open binding per limit and line, no illegal move.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    ForeignKey,
    Identity,
    Index,
    MetaData,
    PrimaryKeyConstraint,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.dialects.postgresql import TIMESTAMP as PG_TIMESTAMP
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NOW = func.clock_timestamp()


_BOUNDED_REWARD = "verdict->>'reward' IS NULL OR abs((verdict->>'reward')::numeric) <= 1e6"


class Base(DeclarativeBase):
    """Plain tables; names of constraints are fixed so that migrations can refer to them."""

    metadata = MetaData(
        naming_convention={
            "pk": "%(table_name)s_pkey",
            "fk": "%(table_name)s_%(column_0_name)s_fkey",
            "uq": "%(table_name)s_%(column_0_N_name)s_key",
        }
    )
    type_annotation_map = {
        str: Text(),
        datetime: PG_TIMESTAMP(timezone=True),
        dict[str, Any]: JSONB(none_as_null=True),
        list[str]: ARRAY(Text()),
    }


def _partial(name: str, where: str, *columns: Any, unique: bool = False) -> Index:
    """An index over the rows that match a condition."""
    return Index(name, *columns, unique=unique, postgresql_where=text(where))


class SpecRow(Base):
    """A task spec, once for all tasks that share it (16 replicas of a group hold one row)."""

    __tablename__ = "specs"
    digest: Mapped[str] = mapped_column(primary_key=True)  # sha256 of the canonical JSON
    body: Mapped[str]  # that JSON: never looked into by a query, so that a bulk load need not parse it


class RunRow(Base):
    """Tasks submitted together."""

    __tablename__ = "runs"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    name: Mapped[str]
    user_name: Mapped[str]
    purpose: Mapped[str]  # evaluation | training | synthesis
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    total: Mapped[int]
    deadline_at: Mapped[datetime | None]  # what has not ended by then ends as `expired`
    idempotency_key: Mapped[str | None]
    budget_usd: Mapped[float | None]  # of model calls, all tasks together; None: not bounded
    max_running: Mapped[int | None]  # attempts at once; None: not bounded
    provenance: Mapped[dict[str, Any] | None]  # datasets with revision and content hash, and the selection
    quorum: Mapped[int | None]  # as the next two: `GroupRules` of a training run
    hedge_after: Mapped[int | None]  # percentile of the run's durations
    most_replicas: Mapped[int | None]

    __table_args__ = (
        CheckConstraint("max_running > 0"),
        CheckConstraint("quorum > 0"),
        CheckConstraint("hedge_after BETWEEN 1 AND 99"),
        CheckConstraint("most_replicas > 0"),
        UniqueConstraint("user_name", "idempotency_key"),
        _partial("runs_budget_idx", "budget_usd IS NOT NULL", "id"),
    )


class TaskRow(Base):
    """One accepted agent task (one replica of a group).

    `run_id` and `spec_digest` are no foreign keys: their rows are written before it in its own transaction, nothing
    ever deletes them, and the check would take a third of the time of a bulk load.
    """

    __tablename__ = "tasks"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    run_id: Mapped[UUID]
    group_id: Mapped[UUID]  # the replicas of one task in a run
    replica: Mapped[int]
    spec_digest: Mapped[str]
    name: Mapped[str]
    agent: Mapped[str]
    model: Mapped[str | None]  # as submitted; None: the agent has none
    user_name: Mapped[str]
    requested_mode: Mapped[str]
    mode: Mapped[str | None]  # what the scheduler made of it
    resource_class: Mapped[str]
    priority: Mapped[int] = mapped_column(server_default="0")  # higher first
    state: Mapped[str] = mapped_column(server_default="pending")
    accepted_at: Mapped[datetime] = mapped_column(server_default=NOW)
    in_line: Mapped[bool] = mapped_column(server_default=text("true"))  # False: delayed, paused, or `waits`
    waits: Mapped[bool] = mapped_column(server_default=text("false"))  # its run comes after tasks that go on
    has_dependents: Mapped[bool] = mapped_column(server_default=text("false"))  # runs come after it, to be seen to
    available_at: Mapped[datetime] = mapped_column(server_default=NOW)  # not before: retries, delays, `PAUSED`
    bounded: Mapped[bool] = mapped_column(server_default=text("false"))  # its run has `max_running`
    graded_apart: Mapped[bool] = mapped_column(server_default=text("false"))  # by a grader, after the agent's end
    group_started: Mapped[bool] = mapped_column(server_default=text("false"))  # a sibling has been admitted
    deadline_at: Mapped[datetime | None]  # the task's own or its run's, whichever is earlier
    lifetime_s: Mapped[float]  # of one attempt, from its claim to its teardown
    max_attempts: Mapped[int]
    attempts: Mapped[int] = mapped_column(server_default="0")  # number of the current attempt: the fencing token
    faults: Mapped[int] = mapped_column(server_default="0")  # infrastructure faults so far; interruptions do not count
    cancel_requested_at: Mapped[datetime | None]
    cancel_reason: Mapped[str | None]  # cancelled | expired | superseded
    finished_at: Mapped[datetime | None]
    end_reason: Mapped[str | None]
    verdict: Mapped[dict[str, Any] | None]
    scripted: Mapped[bool] = mapped_column(server_default=text("false"))  # its graded attempt was
    failure: Mapped[dict[str, Any] | None]
    added_for: Mapped[str | None]  # why its group got it later (`app.ledger.replicas.Why`); None: as submitted

    __table_args__ = (
        CheckConstraint(_BOUNDED_REWARD, name="tasks_reward_check"),
        CheckConstraint(
            "NOT waits OR NOT in_line AND state NOT IN ('admitted', 'running', 'succeeded')", name="tasks_waits_check"
        ),
        Index("tasks_run_id_group_id_idx", "run_id", "group_id"),
        # One ordered line per user, mode and class: the dispatcher reads the head of each and nothing else.
        _partial(
            "tasks_line_idx",
            "state = 'pending' AND in_line",
            "requested_mode",
            "resource_class",
            "user_name",
            text("priority DESC"),
            text("(attempts > 0) DESC"),
            "run_id",
            text("group_started DESC"),
            "id",
        ),
        _partial(
            "tasks_bounded_line_idx",
            "bounded AND state = 'pending' AND in_line",
            "run_id",
            "requested_mode",
            "resource_class",
            "user_name",
        ),
        _partial("tasks_bounded_live_idx", "bounded AND state IN ('admitted', 'running')", "run_id"),
        _partial("tasks_delayed_idx", "state = 'pending' AND NOT in_line AND NOT waits", "available_at"),
        _partial("tasks_waits_idx", "state = 'pending' AND waits", "run_id"),
        _partial("tasks_upstream_ended_idx", "has_dependents AND state IN ('succeeded', 'failed', 'cancelled')", "id"),
        _partial(
            "tasks_superseded_idx",
            "cancel_reason = 'superseded' AND state IN ('admitted', 'running')",
            "cancel_requested_at",
        ),
        _partial(
            "tasks_deadline_idx",
            "deadline_at IS NOT NULL AND state IN ('pending', 'admitted', 'running')",
            "deadline_at",
        ),
    )


class AttemptRow(Base):
    """One try at a task; never deleted."""

    __tablename__ = "attempts"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    task_id: Mapped[UUID] = mapped_column(ForeignKey("tasks.id"))
    number: Mapped[int]
    state: Mapped[str] = mapped_column(server_default="dispatched")
    user_name: Mapped[str]
    mode: Mapped[str]
    resource_class: Mapped[str]
    instance_id: Mapped[UUID | None] = mapped_column(ForeignKey("instances.id"))
    dispatched_at: Mapped[datetime] = mapped_column(server_default=NOW)
    published_at: Mapped[datetime | None]
    queue_host: Mapped[str | None]  # whose own queue its wake-up message is in; None: the common one
    claimed_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    deadline_at: Mapped[datetime | None]  # from the claim to the teardown; None: not claimed, or waits for a grader
    phases: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    environment: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    waits: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))  # limit: seconds waited for it
    cost_usd: Mapped[float | None]  # of its model calls; None: unknown
    scripted: Mapped[bool] = mapped_column(server_default=text("false"))  # a replay engine answered one of its calls
    graded_apart: Mapped[bool] = mapped_column(server_default=text("false"))  # as its task
    gradings: Mapped[int] = mapped_column(server_default="0")  # fencing token: up with each claim of its grading
    end_reason: Mapped[str | None]
    verdict: Mapped[dict[str, Any] | None]
    failure: Mapped[dict[str, Any] | None]

    __table_args__ = (
        CheckConstraint(_BOUNDED_REWARD, name="attempts_reward_check"),
        UniqueConstraint("task_id", "number"),
        _partial("attempts_one_live_idx", "state IN ('dispatched', 'running', 'grading')", "task_id", unique=True),
        _partial(
            "attempts_live_idx", "state IN ('dispatched', 'running')", "mode", "resource_class", "user_name", "state"
        ),
        Index("attempts_instance_id_finished_at_idx", "instance_id", "finished_at"),
        _partial("attempts_unclaimed_idx", "state = 'dispatched'", "mode", "resource_class", "dispatched_at"),
        _partial(
            "attempts_pool_faults_idx",
            "mode = 'persistent' AND end_reason IN ('infrastructure', 'environment_error', 'lost')",
            *("resource_class", "finished_at"),
        ),
        _partial("attempts_graded_apart_idx", "graded_apart AND state IN ('dispatched', 'running')", "resource_class"),
    )


class GradingRow(Base):
    """The grading of an attempt in the state `grading`: waiting, or in a grader's hands. Gone with that state."""

    __tablename__ = "gradings"
    attempt_id: Mapped[UUID] = mapped_column(ForeignKey("attempts.id"), primary_key=True)
    number: Mapped[int]  # of the attempt
    resource_class: Mapped[str]
    submission: Mapped[dict[str, Any]]  # what the agent left
    queued_at: Mapped[datetime] = mapped_column(server_default=NOW)
    available_at: Mapped[datetime] = mapped_column(server_default=NOW)  # not before: after a fault
    published_at: Mapped[datetime | None]
    instance_id: Mapped[UUID | None]  # the grader that has it; None: it waits
    started_at: Mapped[datetime | None]
    faults: Mapped[int] = mapped_column(server_default="0")  # graders lost, gradings that failed
    failure: Mapped[dict[str, Any] | None]  # the last of these

    __table_args__ = (
        _partial("gradings_waiting_idx", "instance_id IS NULL", "available_at"),
        _partial("gradings_instance_id_idx", "instance_id IS NOT NULL", "instance_id"),
    )


class LeaseRow(Base):
    """The right to work on an attempt, until `expires_at`. Narrow, because it is written all the time."""

    __tablename__ = "leases"
    attempt_id: Mapped[UUID] = mapped_column(ForeignKey("attempts.id"), primary_key=True)
    instance_id: Mapped[UUID]
    expires_at: Mapped[datetime]


class InstanceRow(Base):
    """A unit of compute that hosts one Celery worker."""

    __tablename__ = "instances"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    provider: Mapped[str] = mapped_column(server_default="static")
    mode: Mapped[str]
    resource_class: Mapped[str]
    slots: Mapped[int]
    host: Mapped[str | None]  # where it stands; None: tasks cannot be placed there
    state: Mapped[str] = mapped_column(server_default="requested")
    handle: Mapped[str | None]  # the provider's own name for it: a pid, a container id
    attempt_id: Mapped[UUID | None]  # ephemeral: the one attempt that it took
    requested_at: Mapped[datetime] = mapped_column(server_default=NOW)
    ready_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    deadline_at: Mapped[datetime | None]
    exit_code: Mapped[int | None]
    seen_at: Mapped[datetime | None]  # a standing instance's last sign of life
    swept_at: Mapped[datetime | None]  # when what it left behind was removed
    draining_why: Mapped[str | None]  # scaled down, drained by hand, quarantined; None: not draining

    __table_args__ = (
        UniqueConstraint("attempt_id"),
        _partial("instances_unswept_idx", "swept_at IS NULL AND state IN ('terminated', 'failed')", "ended_at"),
        _partial("instances_stillborn_idx", "state = 'failed' AND ready_at IS NULL", "requested_at"),
        _partial("instances_live_idx", "state NOT IN ('terminated', 'failed')", "mode", "resource_class"),
    )


class EventRow(Base):
    """A fact that happened, appended in the transaction that made it true.

    `txid` is that transaction. Ids are given before the commit, so a reader that goes by ids alone can miss one that
    commits late; the stream's position is a snapshot of which transactions were decided (`app.ledger.stream`).
    """

    __tablename__ = "events"
    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    txid: Mapped[int] = mapped_column(BigInteger, server_default=text("(pg_current_xact_id()::text)::bigint"))
    at: Mapped[datetime] = mapped_column(server_default=NOW)
    kind: Mapped[str]  # noun.verb
    run_id: Mapped[UUID | None]
    task_id: Mapped[UUID | None]
    attempt_id: Mapped[UUID | None]
    instance_id: Mapped[UUID | None]
    data: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))

    __table_args__ = (
        Index("events_task_id_idx", "task_id"),
        _partial("events_seldom_idx", "kind IN ('run.receipt', 'audit.alarm', 'audit.cleared')", "kind", "run_id"),
        Index("events_txid_idx", "txid"),  # the stream asks for the newest and for few among millions
    )


class ResourceClassRow(Base):
    """A kind of instance that an administrator offers, with queues and capacity of its own."""

    __tablename__ = "resource_classes"
    name: Mapped[str] = mapped_column(primary_key=True)
    cpus: Mapped[float | None]  # of one instance; None: not bounded
    memory_bytes: Mapped[int | None] = mapped_column(BigInteger)
    gpus: Mapped[int] = mapped_column(server_default="0")
    architecture: Mapped[str | None]  # amd64 | arm64; None: any
    ephemeral_capacity: Mapped[int | None]  # instances at once; None: the setting (`standard`), else none
    ephemeral_provider: Mapped[str | None]  # None: the setting
    persistent_provider: Mapped[str | None]
    pool_min: Mapped[int | None]  # standing instances; None: the setting (`standard`), else none
    pool_max: Mapped[int | None]
    pool_slots: Mapped[int | None]  # attempts at once on one of them
    pool_cooldown_s: Mapped[float | None]  # idle this long before the pool shrinks


class QuotaRow(Base):
    """What one user may have at once, and their weight in the fair share. `*` is everybody without a row."""

    __tablename__ = "quotas"
    user_name: Mapped[str] = mapped_column(primary_key=True)
    weight: Mapped[float] = mapped_column(server_default="1")
    running: Mapped[int | None]  # live attempts; None: no quota
    pending: Mapped[int | None]  # accepted tasks that have not been admitted
    instances: Mapped[int | None]  # ephemeral instances
    spend_usd: Mapped[float | None]  # in all, since `AccountRow.since`


class AccountRow(Base):
    """What a user has spent on model calls, as far as it is known."""

    __tablename__ = "accounts"
    user_name: Mapped[str] = mapped_column(primary_key=True)
    spent_usd: Mapped[float] = mapped_column(server_default="0")
    since: Mapped[datetime] = mapped_column(server_default=NOW)


class LimitRow(Base):
    """A named limit that an administrator has set; what has no row here has the default of the settings."""

    __tablename__ = "limits"
    name: Mapped[str] = mapped_column(primary_key=True)  # e.g. environment_starts:HOST, model_requests:user:NAME
    capacity: Mapped[float]
    set_at: Mapped[datetime] = mapped_column(server_default=NOW)


class SemaphoreHolderRow(Base):
    """A place at a distributed semaphore: waited for while `granted_at` is empty, gone when not renewed."""

    __tablename__ = "semaphore_holders"
    limit_name: Mapped[str]
    holder: Mapped[UUID]
    attempt_id: Mapped[UUID | None]
    instance_id: Mapped[UUID | None]
    asked_at: Mapped[datetime] = mapped_column(server_default=NOW)
    granted_at: Mapped[datetime | None]
    expires_at: Mapped[datetime]

    __table_args__ = (
        PrimaryKeyConstraint("limit_name", "holder"),
        Index("semaphore_holders_attempt_id_idx", "attempt_id"),
    )


class PauseRow(Base):
    """Nothing of this run is admitted until it is resumed."""

    __tablename__ = "pauses"
    kind: Mapped[str]  # run
    name: Mapped[str]
    since: Mapped[datetime] = mapped_column(server_default=NOW)
    reason: Mapped[str] = mapped_column(server_default="")

    __table_args__ = (PrimaryKeyConstraint("kind", "name"),)


class LimitHistoryRow(Base):
    """From when to when a limit kept a user's tasks of a mode and class waiting."""

    __tablename__ = "bindings"
    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    limit_name: Mapped[str]
    user_name: Mapped[str]
    mode: Mapped[str]  # as asked for: ephemeral | persistent | auto
    resource_class: Mapped[str]
    since: Mapped[datetime] = mapped_column(server_default=NOW)
    until: Mapped[datetime | None]

    __table_args__ = (
        _partial(
            "bindings_open_idx", "until IS NULL", "limit_name", "user_name", "mode", "resource_class", unique=True
        ),
        Index("bindings_user_name_since_idx", "user_name", "since"),
    )


class CreatedResourceRow(Base):
    """A container, pod, network or volume that was made for an attempt, and when it was seen gone: a receipt's line."""

    __tablename__ = "created_resources"
    engine_id: Mapped[str] = mapped_column(
        primary_key=True
    )  # the engine's own id, or a local environment's or pod's name
    kind: Mapped[str]  # container | network | volume | folder | environment | pod
    run_id: Mapped[UUID]
    task_id: Mapped[UUID]
    attempt_id: Mapped[UUID]  # the one it was made for; others may have used it after
    instance_id: Mapped[UUID | None]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    destroyed_at: Mapped[datetime | None]
    destroyed_by: Mapped[str | None]  # worker | sweeper | unknown

    __table_args__ = (
        Index("created_resources_run_id_idx", "run_id"),
        _partial("created_resources_standing_idx", "destroyed_at IS NULL", "instance_id"),
    )


PAUSED = "9999-01-01 00:00:00+00"
"""`TaskRow.available_at` of what is paused. Not infinity, which Python's datetime cannot hold."""


class LegalMoveRow(Base):
    """The state machine as the triggers see it; filled by the migrations from `app.models.states`."""

    __tablename__ = "legal_moves"
    kind: Mapped[str]
    old: Mapped[str]
    new: Mapped[str]

    __table_args__ = (PrimaryKeyConstraint("kind", "old", "new"),)
