"""Defines the tables of training samples: policy versions, runs that feed a trainer, groups, leases."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, PrimaryKeyConstraint, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from app.models.tables import NOW, Base


class PolicyVersionRow(Base):
    """A version of a policy's weights. `number` orders the versions: staleness is a difference of numbers."""

    __tablename__ = "policy_versions"
    policy: Mapped[str]  # the model's stable name
    number: Mapped[int]
    version: Mapped[str]
    state: Mapped[str] = mapped_column(server_default="published")  # published | live | refused
    detail: Mapped[str] = mapped_column(server_default="")  # why it was refused
    published_at: Mapped[datetime] = mapped_column(server_default=NOW)
    live_at: Mapped[datetime | None]
    weights: Mapped[str | None]  # a path on its inference servers; None: they get the weights in another way

    __table_args__ = (
        PrimaryKeyConstraint("policy", "number"),
        UniqueConstraint("policy", "version"),
        CheckConstraint("number >= 0"),
    )


class ExperienceRunRow(Base):
    """A run whose attempts become samples."""

    __tablename__ = "experience_runs"
    run_id: Mapped[UUID] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    policy: Mapped[str]
    quorum: Mapped[int | None]  # replicas that complete a group; None: all
    drop_equal: Mapped[bool] = mapped_column(server_default=text("false"))  # equal rewards give no training signal
    allow_scripted: Mapped[bool] = mapped_column(server_default=text("false"))  # only for tests
    max_staleness: Mapped[int | None]  # in versions; limits hand-out and dispatch; None: no limit
    batch_groups: Mapped[int | None]  # groups that its trainer takes at a time; None: not known yet
    consumer: Mapped[str | None]  # the only trainer that gets its groups

    __table_args__ = (CheckConstraint("quorum > 0"), CheckConstraint("max_staleness >= 0"))


class ExperienceLeaseRow(Base):
    """Groups that a consumer holds until `expires_at`, or has committed."""

    __tablename__ = "experience_leases"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    run_id: Mapped[UUID] = mapped_column(ForeignKey("experience_runs.run_id"))
    consumer: Mapped[str]
    state: Mapped[str] = mapped_column(server_default="open")  # open | committed | lapsed
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    expires_at: Mapped[datetime]
    committed_at: Mapped[datetime | None]
    version: Mapped[str | None]  # version of the policy trained with these groups

    __table_args__ = (
        Index("experience_leases_open_idx", "run_id", "expires_at", postgresql_where=text("state = 'open'")),
    )


class ExperienceGroupRow(Base):
    """The samples of one task's replicas."""

    __tablename__ = "experience_groups"
    group_id: Mapped[UUID] = mapped_column(primary_key=True)
    run_id: Mapped[UUID] = mapped_column(ForeignKey("experience_runs.run_id"))
    state: Mapped[str] = mapped_column(server_default="open")  # open | ready | committed | equal | stale | lost
    oldest: Mapped[int | None]  # number of the oldest policy version that wrote samples of it
    closed_at: Mapped[datetime | None]
    detail: Mapped[str] = mapped_column(server_default="")  # for `lost`: how its replicas ended
    lease_id: Mapped[UUID | None] = mapped_column(ForeignKey("experience_leases.id"))  # the newest valid lease

    __table_args__ = (
        Index(
            "experience_groups_ready_idx",
            "run_id",
            "closed_at",
            "group_id",
            postgresql_where=text("state = 'ready' AND lease_id IS NULL"),
        ),
        Index("experience_groups_open_idx", "run_id", postgresql_where=text("state = 'open'")),
        Index("experience_groups_lease_id_idx", "lease_id"),
    )


class ExperienceAttemptRow(Base):
    """Result of one ended attempt: samples in the artifact store, or nothing with a reason."""

    __tablename__ = "experience_attempts"
    attempt_id: Mapped[UUID] = mapped_column(ForeignKey("attempts.id"), primary_key=True)
    task_id: Mapped[UUID]
    group_id: Mapped[UUID] = mapped_column(ForeignKey("experience_groups.group_id"))
    state: Mapped[str]  # stored | nothing
    reason: Mapped[str] = mapped_column(server_default="")
    key: Mapped[str | None]  # of the Parquet file in the artifact store
    samples: Mapped[int] = mapped_column(server_default="0")
    tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    trained_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    oldest: Mapped[int | None]
    reward: Mapped[float | None]
    stored_at: Mapped[datetime] = mapped_column(server_default=NOW)

    __table_args__ = (
        Index("experience_attempts_group_id_idx", "group_id"),
        Index("experience_attempts_one_idx", "task_id", unique=True, postgresql_where=text("state = 'stored'")),
    )
