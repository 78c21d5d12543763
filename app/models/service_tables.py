"""Tables of webhooks, hosts, the model gateway, artifacts, schedules and validations."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import BigInteger, ForeignKey, Identity, Index, PrimaryKeyConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from app.models.tables import NOW, Base


class WebhookRow(Base):
    """A URL that is sent events, at least once, in order, from its position on."""

    __tablename__ = "webhooks"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    url: Mapped[str]
    kinds: Mapped[list[str]]  # event kinds or prefixes ending in `.`; empty: all
    secret_env: Mapped[str | None]  # name of the variable whose value signs the body
    position: Mapped[str]  # of the stream
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    failures: Mapped[int] = mapped_column(server_default="0")  # in a row
    retry_at: Mapped[datetime | None]
    last_error: Mapped[str | None]
    delivered_at: Mapped[datetime | None]


class HostRow(Base):
    """A host that reports its images, as long as it does."""

    __tablename__ = "hosts"
    name: Mapped[str] = mapped_column(primary_key=True)
    seen_at: Mapped[datetime] = mapped_column(server_default=NOW)
    cores: Mapped[int | None]  # as the next three: what `app.ledger.pressure` keeps
    cpu_pressure: Mapped[float | None]
    memory_available: Mapped[float | None]
    pressure_at: Mapped[datetime | None]


class HostImageRow(Base):
    """An image that is on a host, by what tasks call it."""

    __tablename__ = "host_images"
    host: Mapped[str]
    image: Mapped[str]
    since: Mapped[datetime] = mapped_column(server_default=NOW)

    __table_args__ = (PrimaryKeyConstraint("host", "image"), Index("host_images_image_idx", "image"))


class ModelSessionRow(Base):
    """Who a caller of the gateway is: the attempt that a token was made for. The token itself is nowhere kept."""

    __tablename__ = "model_sessions"
    attempt_id: Mapped[UUID] = mapped_column(ForeignKey("attempts.id"), primary_key=True)
    token_sha256: Mapped[str] = mapped_column(unique=True)
    opened_at: Mapped[datetime] = mapped_column(server_default=NOW)
    closed_at: Mapped[datetime | None]  # the account is settled: no more calls

    __table_args__ = (Index("model_sessions_open_idx", "attempt_id", postgresql_where=text("closed_at IS NULL")),)


class ModelCallRow(Base):
    """One call of a model. What was said is in `model_messages`, each message once for its attempt."""

    __tablename__ = "model_calls"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    attempt_id: Mapped[UUID]  # no foreign key, nor below: written in batches, beside what the worker writes
    task_id: Mapped[UUID]
    run_id: Mapped[UUID]
    user_name: Mapped[str]
    dialect: Mapped[str]
    model: Mapped[str]  # as the agent asked for it
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
    cost_usd: Mapped[float | None]  # None: the price is unknown
    scripted: Mapped[bool] = mapped_column(server_default=text("false"))  # a replay engine answered
    messages: Mapped[list[str]]  # digests: the conversation that was sent
    reply: Mapped[str | None]  # digest of the answer; None: there was none
    body: Mapped[bytes]  # zstd of JSON: parameters, digest of the tools, token ids, log-probabilities

    __table_args__ = (
        Index("model_calls_attempt_id_started_at_idx", "attempt_id", "started_at"),
        Index("model_calls_run_id_idx", "run_id"),
        Index("model_calls_user_name_started_at_idx", "user_name", "started_at"),
    )


class ModelMessageRow(Base):
    """A message (or a list of tools) of an attempt's conversations, once."""

    __tablename__ = "model_messages"
    attempt_id: Mapped[UUID]
    digest: Mapped[str]
    body: Mapped[bytes]  # zstd of its JSON

    __table_args__ = (PrimaryKeyConstraint("attempt_id", "digest"),)


class ModelReplicaRow(Base):
    """One engine that answers for a model's stable name."""

    __tablename__ = "model_replicas"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    model: Mapped[str]  # the stable name; `*` takes every name that no other row has
    url: Mapped[str]  # base URL, with /v1
    upstream_model: Mapped[str | None]  # the engine's own name; None: the stable one
    policy_version: Mapped[str] = mapped_column(server_default="")
    dialects: Mapped[list[str]]  # which it speaks; others are translated to the first of them
    api_key_env: Mapped[str | None]  # name of the gateway's variable that has its key
    context_tokens: Mapped[int | None]  # prompt and answer; None: the engine says when it is too much
    engine: Mapped[str] = mapped_column(server_default="")  # an `EngineKind`
    state: Mapped[str] = mapped_column(server_default="active")  # active | draining | held
    added_at: Mapped[datetime] = mapped_column(server_default=NOW)

    __table_args__ = (Index("model_replicas_model_idx", "model"),)


class EngineLoadRow(Base):
    """How full an engine is, as one gateway sees it: `app.ledger.pressure.EngineLoad`."""

    __tablename__ = "engine_loads"
    gateway: Mapped[str]  # a process
    url: Mapped[str]
    models: Mapped[list[str]]  # as the calls of the last seconds named them
    inside: Mapped[int]
    waiting: Mapped[int]
    queued: Mapped[int]
    refused: Mapped[int]
    kv_use: Mapped[float | None]
    at: Mapped[datetime] = mapped_column(server_default=NOW)

    __table_args__ = (PrimaryKeyConstraint("gateway", "url"),)


class ControlTokenRow(Base):
    """Proof for a gateway that its caller may write to this database; used once."""

    __tablename__ = "control_tokens"
    token_sha256: Mapped[str] = mapped_column(primary_key=True)
    expires_at: Mapped[datetime]


class ValidationRow(Base):
    """Whether a task may be counted on, on one image; the fields are those of `app.models.validation.Validation`."""

    __tablename__ = "validations"
    content: Mapped[str]  # digest of the task: image source, goal, solution
    image_id: Mapped[str]  # as attempts record it; empty: not known (yet)
    dataset: Mapped[str]
    task: Mapped[str]
    image: Mapped[str]
    state: Mapped[str]  # candidate | built | valid | quarantined
    reason: Mapped[str] = mapped_column(server_default="")
    details: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    changed_at: Mapped[datetime] = mapped_column(server_default=NOW)

    __table_args__ = (PrimaryKeyConstraint("content", "image_id"), Index("validations_task_idx", "task"))


class TaskDependencyRow(Base):
    """A task that all tasks of a run come after; with a path, its artifact of this kind is put there as a file."""

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
    settled_until: Mapped[datetime]  # every due time up to here was fired or, by policy, passed over


class ScheduleFireRow(Base):
    """One due time of a schedule: its key makes firing exactly-once, however many beats tick."""

    __tablename__ = "schedule_fires"
    schedule_id: Mapped[UUID] = mapped_column(ForeignKey("schedules.id", ondelete="CASCADE"))
    due_at: Mapped[datetime]
    fired_at: Mapped[datetime] = mapped_column(server_default=NOW)
    run_id: Mapped[UUID | None]
    failure: Mapped[str | None]

    __table_args__ = (PrimaryKeyConstraint("schedule_id", "due_at"),)


class UserTokenRow(Base):
    """A secret by which the web server knows a user; its digest alone is kept."""

    __tablename__ = "user_tokens"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    token_sha256: Mapped[str] = mapped_column(unique=True)
    user_name: Mapped[str]
    kind: Mapped[str]  # token | session (a browser's) | link (signs in once)
    scopes: Mapped[list[str]]  # read | submit | administer
    label: Mapped[str] = mapped_column(server_default="")
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    expires_at: Mapped[datetime | None]
    used_at: Mapped[datetime | None]  # last, to the minute

    __table_args__ = (Index("user_tokens_user_name_idx", "user_name"),)


class UserActionRow(Base):
    """What a user did through the web server: who, when, what, to which run, task or limit, and why."""

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
    """A machine that joined by a token, with accounts of its own in PostgreSQL and Redis until it leaves."""

    __tablename__ = "joined_hosts"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    name: Mapped[str]
    account: Mapped[str] = mapped_column(unique=True)  # of its role in PostgreSQL and its user in Redis
    broker_sha256: Mapped[str]  # of the password in Redis, which keeps no users over a restart
    secret_sha256: Mapped[str] = mapped_column(unique=True)  # of what it leaves with
    instance_id: Mapped[UUID | None]  # the one instance that it is; it leaves when that has ended
    joined_at: Mapped[datetime] = mapped_column(server_default=NOW)
    left_at: Mapped[datetime | None]

    __table_args__ = (Index("joined_hosts_name_key", "name", unique=True, postgresql_where=text("left_at IS NULL")),)


class JoinTokenRow(Base):
    """A secret by which one machine may join once; its digest alone is kept."""

    __tablename__ = "join_tokens"
    token_sha256: Mapped[str] = mapped_column(primary_key=True)
    host_name: Mapped[str] = mapped_column(server_default="")  # empty: what the machine calls itself
    instance_id: Mapped[UUID | None]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    expires_at: Mapped[datetime]
    used_at: Mapped[datetime | None]
    key_sha256: Mapped[str | None]  # of the machine that used it up
    host_id: Mapped[UUID | None]  # which joined then
