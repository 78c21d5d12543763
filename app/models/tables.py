"""The tables: what PostgreSQL holds as the truth.

Invariants are indexes and triggers here, not habits of the code: one live attempt per task, one attempt per ephemeral
instance, one firing per schedule and due time, no illegal move.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
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
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.dialects.postgresql import TIMESTAMP as PG_TIMESTAMP
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NOW = func.clock_timestamp()


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
    }


class Spec(Base):
    """A task spec, once for all tasks that share it (16 replicas of a group hold one row)."""

    __tablename__ = "specs"
    digest: Mapped[str] = mapped_column(primary_key=True)  # sha256 of the canonical JSON
    body: Mapped[dict[str, Any]]


class Run(Base):
    """Tasks submitted together."""

    __tablename__ = "runs"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    name: Mapped[str]
    user_name: Mapped[str]
    purpose: Mapped[str]  # evaluation | training | synthesis
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    total: Mapped[int]
    idempotency_key: Mapped[str | None]

    __table_args__ = (UniqueConstraint("user_name", "idempotency_key"),)


class Task(Base):
    """One accepted agent task (one replica of a group)."""

    __tablename__ = "tasks"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    run_id: Mapped[UUID] = mapped_column(ForeignKey("runs.id"))
    group_id: Mapped[UUID]  # the replicas of one task in a run
    replica: Mapped[int]
    spec_digest: Mapped[str] = mapped_column(ForeignKey("specs.digest"))
    name: Mapped[str]
    agent: Mapped[str]
    user_name: Mapped[str]
    requested_mode: Mapped[str]
    mode: Mapped[str | None]  # what the scheduler made of it
    resource_class: Mapped[str]
    priority: Mapped[int] = mapped_column(server_default="0")  # higher first
    state: Mapped[str] = mapped_column(server_default="pending")
    accepted_at: Mapped[datetime] = mapped_column(server_default=NOW)
    available_at: Mapped[datetime] = mapped_column(server_default=NOW)  # not before: retries and delays
    max_attempts: Mapped[int]
    attempts: Mapped[int] = mapped_column(server_default="0")  # number of the current attempt: the fencing token
    faults: Mapped[int] = mapped_column(server_default="0")  # infrastructure faults so far; interruptions do not count
    cancel_requested_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    end_reason: Mapped[str | None]
    verdict: Mapped[dict[str, Any] | None]
    failure: Mapped[dict[str, Any] | None]
    idempotency_key: Mapped[str | None]

    __table_args__ = (
        UniqueConstraint("user_name", "idempotency_key"),
        Index("tasks_run_id_state_idx", "run_id", "state"),
        Index("tasks_group_id_idx", "group_id"),
        Index(
            "tasks_waiting_idx",
            text("priority DESC"),
            "accepted_at",
            "id",
            postgresql_where=text("state = 'pending'"),
        ),
    )


class Attempt(Base):
    """One try at a task; never deleted."""

    __tablename__ = "attempts"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    task_id: Mapped[UUID] = mapped_column(ForeignKey("tasks.id"))
    number: Mapped[int]
    state: Mapped[str] = mapped_column(server_default="dispatched")
    mode: Mapped[str]
    resource_class: Mapped[str]
    instance_id: Mapped[UUID | None] = mapped_column(ForeignKey("instances.id"))
    dispatched_at: Mapped[datetime] = mapped_column(server_default=NOW)
    published_at: Mapped[datetime | None]
    claimed_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    deadline_at: Mapped[datetime | None]  # from the claim to the teardown
    phases: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    environment: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    end_reason: Mapped[str | None]
    verdict: Mapped[dict[str, Any] | None]
    failure: Mapped[dict[str, Any] | None]

    __table_args__ = (
        UniqueConstraint("task_id", "number"),
        Index(
            "attempts_one_live_idx",
            "task_id",
            unique=True,
            postgresql_where=text("state IN ('dispatched', 'running')"),
        ),
        Index(
            "attempts_live_idx",
            "mode",
            "resource_class",
            postgresql_where=text("state IN ('dispatched', 'running')"),
        ),
        Index("attempts_instance_id_idx", "instance_id"),
    )


class Lease(Base):
    """The right to work on an attempt, until `expires_at`. Narrow, because it is written all the time."""

    __tablename__ = "leases"
    attempt_id: Mapped[UUID] = mapped_column(ForeignKey("attempts.id"), primary_key=True)
    instance_id: Mapped[UUID]
    expires_at: Mapped[datetime]


class Instance(Base):
    """A unit of compute that hosts one Celery worker."""

    __tablename__ = "instances"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    provider: Mapped[str]
    mode: Mapped[str]
    resource_class: Mapped[str]
    slots: Mapped[int]
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

    __table_args__ = (
        UniqueConstraint("attempt_id"),
        Index("instances_open_idx", "state", postgresql_where=text("swept_at IS NULL")),
        Index("instances_requested_at_idx", "requested_at"),
        Index(
            "instances_live_idx",
            "mode",
            "resource_class",
            postgresql_where=text("state NOT IN ('terminated', 'failed')"),
        ),
    )


class Event(Base):
    """A fact that happened, appended in the transaction that made it true."""

    __tablename__ = "events"
    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=NOW)
    kind: Mapped[str]  # noun.verb
    run_id: Mapped[UUID | None]
    task_id: Mapped[UUID | None]
    attempt_id: Mapped[UUID | None]
    instance_id: Mapped[UUID | None]
    data: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))

    __table_args__ = (Index("events_task_id_idx", "task_id"), Index("events_run_id_idx", "run_id"))


class Artifact(Base):
    """Bytes in the store, or the recorded fact that there are none."""

    __tablename__ = "artifacts"
    attempt_id: Mapped[UUID] = mapped_column(ForeignKey("attempts.id"))
    kind: Mapped[str]
    key: Mapped[str | None]
    url: Mapped[str | None]
    size_bytes: Mapped[int | None] = mapped_column(BigInteger)
    sha256: Mapped[str | None]
    missing: Mapped[str | None]  # why there is none
    stored_at: Mapped[datetime] = mapped_column(server_default=NOW)

    __table_args__ = (PrimaryKeyConstraint("attempt_id", "kind"),)


class Schedule(Base):
    """A recurring evaluation."""

    __tablename__ = "schedules"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    cron: Mapped[str]  # five fields, UTC
    dataset: Mapped[str]
    submission: Mapped[dict[str, Any]]  # agent, mode, model, replicas, limit
    misfire: Mapped[str]  # skip | once
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    settled_until: Mapped[datetime]  # every due time up to here was fired or, by policy, passed over


class ScheduleFire(Base):
    """One due time of a schedule: its key makes firing exactly-once, however many beats tick."""

    __tablename__ = "schedule_fires"
    schedule_id: Mapped[UUID] = mapped_column(ForeignKey("schedules.id", ondelete="CASCADE"))
    due_at: Mapped[datetime]
    fired_at: Mapped[datetime] = mapped_column(server_default=NOW)
    run_id: Mapped[UUID | None]
    failure: Mapped[str | None]

    __table_args__ = (PrimaryKeyConstraint("schedule_id", "due_at"),)


class LegalMove(Base):
    """The state machine as the triggers see it; filled by the migrations from `app.models.states`."""

    __tablename__ = "legal_moves"
    kind: Mapped[str]
    old: Mapped[str]
    new: Mapped[str]

    __table_args__ = (PrimaryKeyConstraint("kind", "old", "new"),)
