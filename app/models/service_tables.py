"""Defines the tables of webhooks, hosts, the model gateway, artifacts, schedules and validations."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import BigInteger, ForeignKey, Identity, Index, PrimaryKeyConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from app.models.tables import NOW, Base


class WebhookRow(Base):
    """A URL that receives events at least once, in order, from its position on."""

    __tablename__ = "webhooks"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    url: Mapped[str]
    kinds: Mapped[list[str]]  # event kinds or prefixes ending in `.`; empty: all
    secret_env: Mapped[str | None]  # name of the variable whose value signs the body
    position: Mapped[str]  # in the event stream
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    failures: Mapped[int] = mapped_column(server_default="0")  # consecutive failures
    retry_at: Mapped[datetime | None]
    last_error: Mapped[str | None]
    delivered_at: Mapped[datetime | None]


class HostRow(Base):
    """A host, while it reports its images."""

    __tablename__ = "hosts"
    name: Mapped[str] = mapped_column(primary_key=True)
    seen_at: Mapped[datetime] = mapped_column(server_default=NOW)
    cores: Mapped[int | None]  # this and the next three: written by `app.ledger.pressure`
    cpu_pressure: Mapped[float | None]
    memory_available: Mapped[float | None]
    pressure_at: Mapped[datetime | None]


class HostImageRow(Base):
    """An image on a host, by the name that tasks use."""

    __tablename__ = "host_images"
    host: Mapped[str]
    image: Mapped[str]
    since: Mapped[datetime] = mapped_column(server_default=NOW)

    __table_args__ = (PrimaryKeyConstraint("host", "image"), Index("host_images_image_idx", "image"))


class ModelSessionRow(Base):
    """Identifies a caller of the gateway: the attempt that a token belongs to. The token itself is not stored."""

    __tablename__ = "model_sessions"
    attempt_id: Mapped[UUID] = mapped_column(ForeignKey("attempts.id"), primary_key=True)
    token_sha256: Mapped[str] = mapped_column(unique=True)
    opened_at: Mapped[datetime] = mapped_column(server_default=NOW)
    closed_at: Mapped[datetime | None]  # the account is final: no more calls

    __table_args__ = (Index("model_sessions_open_idx", "attempt_id", postgresql_where=text("closed_at IS NULL")),)


class ModelCallRow(Base):
    """A model call. Its messages are in `model_messages`, each message once per attempt."""

    __tablename__ = "model_calls"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    attempt_id: Mapped[UUID]  # no foreign keys here and below: written in batches, separately from the worker
    task_id: Mapped[UUID]
    run_id: Mapped[UUID]
    user_name: Mapped[str]
    dialect: Mapped[str]
    model: Mapped[str]  # name in the agent's request
    upstream_model: Mapped[str]
    replica: Mapped[str]
    policy_version: Mapped[str]
    started_at: Mapped[datetime]
    first_byte_s: Mapped[float | None]
    duration_s: Mapped[float]
    waited: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    retries: Mapped[int] = mapped_column(server_default="0")
    streamed: Mapped[bool]
    status: Mapped[int | None]
    end_kind: Mapped[str]
    detail: Mapped[str] = mapped_column(server_default="")
    finish_reason: Mapped[str] = mapped_column(server_default="")
    is_turn: Mapped[bool]
    offers_tools: Mapped[bool] = mapped_column(server_default=text("false"))
    prompt_tokens: Mapped[int | None]
    completion_tokens: Mapped[int | None]
    cached_tokens: Mapped[int | None]
    reasoning_tokens: Mapped[int | None]
    cost_usd: Mapped[float | None]  # None: unknown price
    scripted: Mapped[bool] = mapped_column(server_default=text("false"))  # a replay engine answered
    messages: Mapped[list[str]]  # digests of the conversation sent
    reply: Mapped[str | None]  # digest of the answer; None: no answer
    body: Mapped[bytes]  # zstd of JSON: parameters, digest of the tools, token ids, log-probabilities

    __table_args__ = (
        Index("model_calls_attempt_id_started_at_idx", "attempt_id", "started_at"),
        Index("model_calls_run_id_idx", "run_id"),
        Index("model_calls_user_name_started_at_idx", "user_name", "started_at"),
    )


class ModelMessageRow(Base):
    """A message (or a list of tools) of an attempt's conversations, stored once."""

    __tablename__ = "model_messages"
    attempt_id: Mapped[UUID]
    digest: Mapped[str]
    body: Mapped[bytes]  # zstd of its JSON

    __table_args__ = (PrimaryKeyConstraint("attempt_id", "digest"),)


class ModelReplicaRow(Base):
    """An inference server that serves a model's stable name."""

    __tablename__ = "model_replicas"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    model: Mapped[str]  # the stable name; `*` matches every name without a row
    url: Mapped[str]  # base URL, with /v1
    upstream_model: Mapped[str | None]  # the server's name of the model; None: the stable name
    policy_version: Mapped[str] = mapped_column(server_default="")
    dialects: Mapped[list[str]]  # dialects it supports; others are translated to the first
    api_key_env: Mapped[str | None]  # name of the gateway's variable with its key
    context_tokens: Mapped[int | None]  # prompt and answer; None: the server refuses what is too long
    engine: Mapped[str] = mapped_column(server_default="")  # an `EngineKind`
    state: Mapped[str] = mapped_column(server_default="active")  # active | draining | held
    added_at: Mapped[datetime] = mapped_column(server_default=NOW)

    __table_args__ = (Index("model_replicas_model_idx", "model"),)


class EngineLoadRow(Base):
    """Load of an inference server as measured by one gateway: `app.ledger.pressure.EngineLoad`."""

    __tablename__ = "engine_loads"
    gateway: Mapped[str]  # id of the process
    url: Mapped[str]
    models: Mapped[list[str]]  # names used by the calls of the last seconds
    inside: Mapped[int]
    waiting: Mapped[int]
    queued: Mapped[int]
    refused: Mapped[int]
    kv_use: Mapped[float | None]
    at: Mapped[datetime] = mapped_column(server_default=NOW)

    __table_args__ = (PrimaryKeyConstraint("gateway", "url"),)


class ControlTokenRow(Base):
    """Single-use proof for a gateway that its caller may write to this database."""

    __tablename__ = "control_tokens"
    token_sha256: Mapped[str] = mapped_column(primary_key=True)
    expires_at: Mapped[datetime]


class ValidationRow(Base):
    """Validation of a task on one image; the fields are those of `app.models.validation.Validation`."""

    __tablename__ = "validations"
    content: Mapped[str]  # digest of the task: image source, goal, solution
    image_id: Mapped[str]  # as recorded by attempts; empty: not known (yet)
    dataset: Mapped[str]
    task: Mapped[str]
    image: Mapped[str]
    state: Mapped[str]  # candidate | built | valid | quarantined
    reason: Mapped[str] = mapped_column(server_default="")
    details: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    changed_at: Mapped[datetime] = mapped_column(server_default=NOW)

    __table_args__ = (PrimaryKeyConstraint("content", "image_id"), Index("validations_task_idx", "task"))


class TaskDependencyRow(Base):
    """A task that all tasks of a run depend on; with a path, its artifact of this kind becomes a file there."""

    __tablename__ = "task_dependencies"
    run_id: Mapped[UUID]
    on_task: Mapped[UUID] = mapped_column(ForeignKey("tasks.id"))
    path: Mapped[str] = mapped_column(server_default="")
    kind: Mapped[str] = mapped_column(server_default="")

    __table_args__ = (
        PrimaryKeyConstraint("run_id", "on_task", "path"),
        Index("task_dependencies_on_task_idx", "on_task"),
    )


class ArtifactRow(Base):
    """Content in the store, or a record that there is none."""

    __tablename__ = "artifacts"
    attempt_id: Mapped[UUID] = mapped_column(ForeignKey("attempts.id"))
    kind: Mapped[str]
    key: Mapped[str | None]
    url: Mapped[str | None]
    size_bytes: Mapped[int | None] = mapped_column(BigInteger)
    sha256: Mapped[str | None]
    missing: Mapped[str | None]  # reason why there is none
    stored_at: Mapped[datetime] = mapped_column(server_default=NOW)

    __table_args__ = (PrimaryKeyConstraint("attempt_id", "kind"),)


class ScheduleRow(Base):
    """A recurring evaluation."""

    __tablename__ = "schedules"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    cron: Mapped[str]  # five fields, UTC
    dataset: Mapped[str]
    submission: Mapped[dict[str, Any]]  # agent, mode, model, replicas, limit
    misfire: Mapped[str]  # skip | once
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    settled_until: Mapped[datetime]  # every due time up to here was fired or, by policy, skipped


class ScheduleFireRow(Base):
    """A due time of a schedule: its key makes firing exactly-once, with any number of beat processes."""

    __tablename__ = "schedule_fires"
    schedule_id: Mapped[UUID] = mapped_column(ForeignKey("schedules.id", ondelete="CASCADE"))
    due_at: Mapped[datetime]
    fired_at: Mapped[datetime] = mapped_column(server_default=NOW)
    run_id: Mapped[UUID | None]
    failure: Mapped[str | None]

    __table_args__ = (PrimaryKeyConstraint("schedule_id", "due_at"),)


class UserTokenRow(Base):
    """A secret that identifies a user to the web server; only its digest is stored."""

    __tablename__ = "user_tokens"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    token_sha256: Mapped[str] = mapped_column(unique=True)
    user_name: Mapped[str]
    kind: Mapped[str]  # token | session (a browser's) | link (signs in once)
    scopes: Mapped[list[str]]  # read | submit | administer
    label: Mapped[str] = mapped_column(server_default="")
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    expires_at: Mapped[datetime | None]
    used_at: Mapped[datetime | None]  # last use, to the minute

    __table_args__ = (Index("user_tokens_user_name_idx", "user_name"),)


class UserActionRow(Base):
    """An action of a user through the web server: user, time, action, its run, task or limit, and reason."""

    __tablename__ = "user_actions"
    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=NOW)
    user_name: Mapped[str]
    action: Mapped[str]
    subject: Mapped[str]
    reason: Mapped[str] = mapped_column(server_default="")
    data: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))

    __table_args__ = (Index("user_actions_subject_idx", "subject"),)


class JoinedHostRow(Base):
    """A machine that joined by a token, with its own accounts in PostgreSQL and Redis until it leaves."""

    __tablename__ = "joined_hosts"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    name: Mapped[str]
    account: Mapped[str] = mapped_column(unique=True)  # name of its role in PostgreSQL and of its user in Redis
    broker_sha256: Mapped[str]  # digest of the password in Redis, which loses its users at a restart
    secret_sha256: Mapped[str] = mapped_column(unique=True)  # digest of the secret it leaves with
    instance_id: Mapped[UUID | None]  # its only instance; the host leaves when this has ended
    joined_at: Mapped[datetime] = mapped_column(server_default=NOW)
    left_at: Mapped[datetime | None]

    __table_args__ = (Index("joined_hosts_name_key", "name", unique=True, postgresql_where=text("left_at IS NULL")),)


class JoinTokenRow(Base):
    """A secret with which one machine may join once; only its digest is stored."""

    __tablename__ = "join_tokens"
    token_sha256: Mapped[str] = mapped_column(primary_key=True)
    host_name: Mapped[str] = mapped_column(server_default="")  # empty: the machine's own name
    instance_id: Mapped[UUID | None]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    expires_at: Mapped[datetime]
    used_at: Mapped[datetime | None]
    key_sha256: Mapped[str | None]  # digest of the key of the machine that used it
    host_id: Mapped[UUID | None]  # the host that joined with it
