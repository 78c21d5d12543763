"""Defines the tables of PostgreSQL.

Indexes and triggers enforce the invariants, not only code: one live attempt per task, one attempt per ephemeral
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
    """Base of the tables; names of constraints are fixed so that migrations can refer to them."""

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
    """Returns an index over the rows that match a condition."""
    return Index(name, *columns, unique=unique, postgresql_where=text(where))


class SpecRow(Base):
    """A task spec, stored once for all tasks that share it (16 replicas of a group share one row)."""

    __tablename__ = "specs"
    digest: Mapped[str] = mapped_column(primary_key=True)  # sha256 of the canonical JSON
    body: Mapped[str]  # that JSON, as text: no query reads inside, so a bulk load need not parse it


class RunRow(Base):
    """Tasks submitted together."""

    __tablename__ = "runs"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    name: Mapped[str]
    user_name: Mapped[str]
    purpose: Mapped[str]  # evaluation | training | synthesis
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    total: Mapped[int]
    deadline_at: Mapped[datetime | None]  # tasks not ended by then end as `expired`
    idempotency_key: Mapped[str | None]
    budget_usd: Mapped[float | None]  # for model calls of all tasks together; None: no limit
    max_running: Mapped[int | None]  # attempts at once; None: no limit
    provenance: Mapped[dict[str, Any] | None]  # datasets with revision and content hash, and the selection
    quorum: Mapped[int | None]  # this and the next two: `GroupRules` of a training run
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
    """An accepted agent task (one replica of a group).

    `run_id` and `spec_digest` are not foreign keys: their rows are written earlier in the same transaction and never
    deleted, and the check would take a third of the time of a bulk load.
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
    mode: Mapped[str | None]  # as chosen by the scheduler
    resource_class: Mapped[str]
    priority: Mapped[int] = mapped_column(server_default="0")  # higher first
    state: Mapped[str] = mapped_column(server_default="pending")
    accepted_at: Mapped[datetime] = mapped_column(server_default=NOW)
    in_line: Mapped[bool] = mapped_column(server_default=text("true"))  # False: delayed, paused, or `waits`
    waits: Mapped[bool] = mapped_column(server_default=text("false"))  # its run depends on tasks that have not ended
    has_dependents: Mapped[bool] = mapped_column(server_default=text("false"))  # other runs depend on it
    available_at: Mapped[datetime] = mapped_column(server_default=NOW)  # earliest start: retries, delays, `PAUSED`
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
    scripted: Mapped[bool] = mapped_column(server_default=text("false"))  # its graded attempt was scripted
    failure: Mapped[dict[str, Any] | None]
    added_for: Mapped[str | None]  # reason why it was added to its group (`app.ledger.replicas.Why`); None: submitted

    __table_args__ = (
        CheckConstraint(_BOUNDED_REWARD, name="tasks_reward_check"),
        CheckConstraint(
            "NOT waits OR NOT in_line AND state NOT IN ('admitted', 'running', 'succeeded')", name="tasks_waits_check"
        ),
        Index("tasks_run_id_group_id_idx", "run_id", "group_id"),
        # One ordered line per user, mode and class: the dispatcher reads only the head of each.
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
    """An attempt at a task; never deleted."""

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
    queue_host: Mapped[str | None]  # host whose queue has its wake-up message; None: the common queue
    claimed_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    deadline_at: Mapped[datetime | None]  # for claim to teardown; None: not claimed, or waits for a grader
    phases: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    environment: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    waits: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))  # limit: seconds waited for it
    cost_usd: Mapped[float | None]  # of its model calls; None: unknown
    scripted: Mapped[bool] = mapped_column(server_default=text("false"))  # a replay engine answered a model call
    graded_apart: Mapped[bool] = mapped_column(server_default=text("false"))  # copied from its task
    gradings: Mapped[int] = mapped_column(server_default="0")  # fencing token: increased by each claim of its grading
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
    """Grading of an attempt in the state `grading`: waiting or claimed. Deleted when the attempt leaves this state."""

    __tablename__ = "gradings"
    attempt_id: Mapped[UUID] = mapped_column(ForeignKey("attempts.id"), primary_key=True)
    number: Mapped[int]  # of the attempt
    resource_class: Mapped[str]
    submission: Mapped[dict[str, Any]]  # the agent's result
    queued_at: Mapped[datetime] = mapped_column(server_default=NOW)
    available_at: Mapped[datetime] = mapped_column(server_default=NOW)  # earliest start, after a fault
    published_at: Mapped[datetime | None]
    instance_id: Mapped[UUID | None]  # the grader that claimed it; None: waiting
    started_at: Mapped[datetime | None]
    faults: Mapped[int] = mapped_column(server_default="0")  # lost graders and failed gradings
    failure: Mapped[dict[str, Any] | None]  # the last fault

    __table_args__ = (
        _partial("gradings_waiting_idx", "instance_id IS NULL", "available_at"),
        _partial("gradings_instance_id_idx", "instance_id IS NOT NULL", "instance_id"),
    )


class LeaseRow(Base):
    """Right to work on an attempt until `expires_at`. A narrow table, because it is updated very often."""

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
    host: Mapped[str | None]  # host it runs on; None: tasks cannot be placed there
    state: Mapped[str] = mapped_column(server_default="requested")
    handle: Mapped[str | None]  # the provider's name of it: a pid, a container id
    attempt_id: Mapped[UUID | None]  # ephemeral: the attempt that it claimed
    requested_at: Mapped[datetime] = mapped_column(server_default=NOW)
    ready_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    deadline_at: Mapped[datetime | None]
    exit_code: Mapped[int | None]
    seen_at: Mapped[datetime | None]  # last heartbeat of a standing instance
    swept_at: Mapped[datetime | None]  # time at which its leftovers were removed
    draining_why: Mapped[str | None]  # scaled down, drained by hand, quarantined; None: not draining

    __table_args__ = (
        UniqueConstraint("attempt_id"),
        _partial("instances_unswept_idx", "swept_at IS NULL AND state IN ('terminated', 'failed')", "ended_at"),
        _partial("instances_stillborn_idx", "state = 'failed' AND ready_at IS NULL", "requested_at"),
        _partial("instances_live_idx", "state NOT IN ('terminated', 'failed')", "mode", "resource_class"),
    )


class EventRow(Base):
    """An event, appended in the transaction that caused it.

    `txid` is that transaction. Ids are assigned before the commit, so a reader that uses only ids can miss an event
    that commits late. The stream's position is a snapshot of the decided transactions (`app.ledger.stream`).
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
        Index("events_txid_idx", "txid"),  # the stream selects the newest and a few among millions
    )


class ResourceClassRow(Base):
    """A kind of instance offered by an administrator, with its own queues and capacity."""

    __tablename__ = "resource_classes"
    name: Mapped[str] = mapped_column(primary_key=True)
    cpus: Mapped[float | None]  # of one instance; None: no limit
    memory_bytes: Mapped[int | None] = mapped_column(BigInteger)
    gpus: Mapped[int] = mapped_column(server_default="0")
    architecture: Mapped[str | None]  # amd64 | arm64; None: any
    ephemeral_capacity: Mapped[int | None]  # instances at once; None: the setting (`standard`), else none
    ephemeral_provider: Mapped[str | None]  # None: the setting
    persistent_provider: Mapped[str | None]
    pool_min: Mapped[int | None]  # standing instances; None: the setting (`standard`), else none
    pool_max: Mapped[int | None]
    pool_slots: Mapped[int | None]  # attempts at once on one instance
    pool_cooldown_s: Mapped[float | None]  # idle time before the pool shrinks


class QuotaRow(Base):
    """Limits of a user, and the user's weight in the fair share. `*` applies to every user without a row."""

    __tablename__ = "quotas"
    user_name: Mapped[str] = mapped_column(primary_key=True)
    weight: Mapped[float] = mapped_column(server_default="1")
    running: Mapped[int | None]  # live attempts; None: no quota
    pending: Mapped[int | None]  # accepted tasks not yet admitted
    instances: Mapped[int | None]  # ephemeral instances
    spend_usd: Mapped[float | None]  # in total, since `AccountRow.since`


class AccountRow(Base):
    """Known cost of a user's model calls."""

    __tablename__ = "accounts"
    user_name: Mapped[str] = mapped_column(primary_key=True)
    spent_usd: Mapped[float] = mapped_column(server_default="0")
    since: Mapped[datetime] = mapped_column(server_default=NOW)


class LimitRow(Base):
    """A named limit set by an administrator; a limit without a row has the default of the settings."""

    __tablename__ = "limits"
    name: Mapped[str] = mapped_column(primary_key=True)  # e.g. environment_starts:HOST, model_requests:user:NAME
    capacity: Mapped[float]
    set_at: Mapped[datetime] = mapped_column(server_default=NOW)


class SemaphoreHolderRow(Base):
    """A place at a distributed semaphore: waiting while `granted_at` is empty; lost when not renewed."""

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
    """A paused run: none of its tasks is admitted until it is resumed."""

    __tablename__ = "pauses"
    kind: Mapped[str]  # run
    name: Mapped[str]
    since: Mapped[datetime] = mapped_column(server_default=NOW)
    reason: Mapped[str] = mapped_column(server_default="")

    __table_args__ = (PrimaryKeyConstraint("kind", "name"),)


class LimitHistoryRow(Base):
    """Period in which a limit kept a user's tasks of a mode and class waiting."""

    __tablename__ = "bindings"
    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    limit_name: Mapped[str]
    user_name: Mapped[str]
    mode: Mapped[str]  # as requested: ephemeral | persistent | auto
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
    """A container, pod, network or volume created for an attempt, and the time of its removal: a line of a receipt."""

    __tablename__ = "created_resources"
    engine_id: Mapped[str] = mapped_column(
        primary_key=True
    )  # the engine's own id, or a local environment's or pod's name
    kind: Mapped[str]  # container | network | volume | folder | environment | pod
    run_id: Mapped[UUID]
    task_id: Mapped[UUID]
    attempt_id: Mapped[UUID]  # created for this attempt; later attempts may have used it
    instance_id: Mapped[UUID | None]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    destroyed_at: Mapped[datetime | None]
    destroyed_by: Mapped[str | None]  # worker | sweeper | unknown

    __table_args__ = (
        Index("created_resources_run_id_idx", "run_id"),
        _partial("created_resources_standing_idx", "destroyed_at IS NULL", "instance_id"),
    )


PAUSED = "9999-01-01 00:00:00+00"
"""`TaskRow.available_at` of paused tasks. Not infinity, which Python's datetime cannot represent."""


class LegalMoveRow(Base):
    """State machine for the triggers; filled by the migrations from `app.models.states`."""

    __tablename__ = "legal_moves"
    kind: Mapped[str]
    old: Mapped[str]
    new: Mapped[str]

    __table_args__ = (PrimaryKeyConstraint("kind", "old", "new"),)
