"""Operations of administrators: limits, quotas, schedules, models, instances, users, the trail of actions."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal
from uuid import UUID

import structlog
from pydantic import Field

from app.errors import NotAllowed, OptionInvalid
from app.evaluation import Submission
from app.ledger import classes, instances, limits, model_replicas, quotas, schedules, users
from app.ledger.classes import ResourceClass
from app.ledger.instances import LiveInstance
from app.ledger.limits import Use
from app.ledger.model_replicas import ModelReplica
from app.ledger.model_usage import UsageRow
from app.ledger.quotas import Quota, QuotaChanges, QuotaUsage
from app.ledger.schedules import Schedule
from app.ledger.users import Scope, UserAction
from app.models.kinds import UsageBy
from app.models.spec import PlainText
from app.models.wire import Wire
from app.scheduling.calendar import check_cron
from app.web.api.operation import Operations
from app.web.calls import WebCall

log = structlog.get_logger()
operations = Operations()


class Who(Wire):
    """The user of the token."""

    user_name: str
    scopes: tuple[Scope, ...]


class UsageQuery(Wire):
    """by: what a row is about; run, user: only these; since, until: only what began then."""

    by: UsageBy = "run"
    run: str | None = None
    user: str | None = None
    since: datetime | None = None
    until: datetime | None = None


class LimitChange(Wire):
    """capacity: of the limit; None: the default."""

    capacity: float | None = Field(ge=0)
    reason: PlainText = Field(default="", max_length=1000)


class QuotaChange(QuotaChanges):
    """The fields to change: a missing field stays as it is, None removes the limit."""

    reason: PlainText = Field(default="", max_length=1000)


class WhyQuery(Wire):
    """A reason, stored in the trail."""

    reason: PlainText = Field(default="", max_length=1000)


class NewSchedule(Wire):
    """A recurring evaluation: `cron` has five fields, in UTC."""

    name: str = Field(min_length=1, max_length=100)
    cron: str
    submission: Submission
    misfire: Literal["skip", "once"] = "skip"
    reason: PlainText = Field(default="", max_length=1000)


class NewUser(Wire):
    """A new token for a user. days: until it lapses; None: it never does."""

    user_name: str
    scope: Scope = Scope.SUBMIT
    days: float | None = Field(default=None, gt=0, le=3660)
    label: str = Field(default="", max_length=200)


class TokenInfo(Wire):
    """A token without its secret."""

    id: UUID
    user_name: str
    kind: str
    scope: Scope
    label: str
    created_at: datetime
    expires_at: datetime | None
    used_at: datetime | None

    @classmethod
    def of(cls, token: users.UserToken) -> TokenInfo:
        fields = {name: getattr(token, name) for name in cls.model_fields if name not in ("scope", "kind")}
        return cls(**fields, kind=token.kind.value, scope=token.highest)


class NewToken(Wire):
    """A new token. Its secret is shown here and never again."""

    token: str
    info: TokenInfo


class Changed(Wire):
    """The subject that was changed or removed."""

    subject: str


class AddedSchedule(Changed):
    """tasks: the number that a firing would have now."""

    tasks: int


@operations.get("/me", Who)
def show_me(call: WebCall) -> Who:
    """Shows the user and the scopes of the token."""
    return Who(user_name=call.caller.user_name, scopes=tuple(sorted(call.caller.scopes)))


@operations.get("/limits", list[Use])
def list_limits(call: WebCall) -> list[Use]:
    """Lists every limit that is set, held or waited for, and the slots of every class."""
    uses = call.flow.installation.limits(lambda error: log.warning("web.limits_unknown", error=str(error)))
    return call.visible(uses)


@operations.get("/usage", list[UsageRow], query=UsageQuery)
def show_usage(call: WebCall) -> list[UsageRow]:
    """Shows tokens, dollars and time, most expensive first: for the caller's runs, or all for an administrator."""
    query: UsageQuery = call.query
    if call.whose is not None and query.user not in (None, call.whose):
        raise NotAllowed(f"expected the user {call.whose!r} of the token, found {query.user!r}")
    run_id = None if query.run is None else call.run(query.run)
    try:
        since, until = (one if one is None or one.tzinfo else one.astimezone() for one in (query.since, query.until))
    except (OverflowError, ValueError):
        raise OptionInvalid("expected `since` and `until` within the years 2 to 9998, found another") from None
    return call.flow.installation.usage(
        query.by, run_id=run_id, user=call.whose or query.user, since=since, until=until
    )


@operations.put("/limits/{name:path}", Changed, body=LimitChange)
def set_limit(call: WebCall) -> Changed:
    """Sets a limit's capacity, or clears it with null."""
    name = call.path["name"]
    if call.body.capacity is None:
        limits.clear_limit(call.database, name)
    else:
        limits.set_limit(call.database, name, call.body.capacity)
    return Changed(subject=call.note("limit.set", name, call.body.reason, capacity=call.body.capacity))


@operations.get("/quotas", list[QuotaUsage], Scope.ADMINISTER)
def list_quotas(call: WebCall) -> list[QuotaUsage]:
    """Lists what users may have at once, and what they have."""
    return quotas.usage(call.database)


@operations.put("/quotas/{user:path}", Quota, body=QuotaChange)
def set_quota(call: WebCall) -> Quota:
    """Changes a user's quota or weight; the user `*` stands for all users without a row."""
    changes = {name: getattr(call.body, name) for name in call.body.model_fields_set - {"reason"}}
    changed = quotas.set_quota(call.database, call.path["user"], **changes)
    call.note("quota.set", call.path["user"], call.body.reason, **changes)
    return changed


@operations.delete("/quotas/{user:path}/spent", float, query=WhyQuery)
def reset_spent(call: WebCall) -> float:
    """Resets a user's spending to 0. Returns the amount before."""
    spent = quotas.reset_spent(call.database, call.path["user"])
    call.note("quota.reset", call.path["user"], call.query.reason, spent_usd_before=spent)
    return spent


@operations.delete("/quotas/{user:path}", Changed, query=WhyQuery)
def clear_quota(call: WebCall) -> Changed:
    """Removes a user's own quota: that of `*` applies again."""
    quotas.remove(call.database, call.path["user"])
    return Changed(subject=call.note("quota.cleared", call.path["user"], call.query.reason))


@operations.get("/schedules", list[Schedule])
def list_schedules(call: WebCall) -> list[Schedule]:
    """Lists recurring evaluations: the caller's, or all for an administrator."""
    listed = schedules.all_of(call.database)
    user = call.caller.user_name
    return [one for one in listed if call.caller.administers or one.submission.get("user_name", "default") == user]


@operations.post("/schedules", AddedSchedule, Scope.ADMINISTER, body=NewSchedule)
def add_schedule(call: WebCall) -> AddedSchedule:
    """Adds a recurring evaluation. A submission that could never run is refused at once."""
    schedule: NewSchedule = call.body
    check_cron(schedule.cron, datetime.now().astimezone())
    tasks = len(call.flow.trial(schedule.submission))
    fields = schedule.submission.scheduled()
    schedules.add(call.database, name=schedule.name, cron=schedule.cron, misfire=schedule.misfire, **fields)
    return AddedSchedule(subject=call.note("schedule.added", schedule.name, schedule.reason), tasks=tasks)


@operations.delete("/schedules/{name:path}", Changed, query=WhyQuery)
def remove_schedule(call: WebCall) -> Changed:
    """Removes a recurring evaluation; its runs stay."""
    schedules.remove(call.database, call.path["name"])
    return Changed(subject=call.note("schedule.removed", call.path["name"], call.query.reason))


@operations.get("/models", list[ModelReplica])
def list_models(call: WebCall) -> list[ModelReplica]:
    """Lists the inference servers of each model name."""
    with call.database.begin() as connection:
        return model_replicas.listed(connection)


@operations.get("/classes", dict[str, ResourceClass])
def list_classes(call: WebCall) -> dict[str, ResourceClass]:
    """Lists resource classes: kinds of instances."""
    with call.database.begin() as connection:
        return classes.load(connection, call.services.settings)


@operations.get("/instances", list[LiveInstance], Scope.ADMINISTER)
def list_instances(call: WebCall) -> list[LiveInstance]:
    """Lists instances that have not ended."""
    return instances.live(call.database)


@operations.get("/users", list[TokenInfo], Scope.ADMINISTER)
def list_users(call: WebCall) -> list[TokenInfo]:
    """Lists the tokens of all users, without their secrets."""
    return [TokenInfo.of(token) for token in users.all_tokens(call.database)]


@operations.post("/users", NewToken, Scope.ADMINISTER, body=NewUser)
def add_user(call: WebCall) -> NewToken:
    """Makes a token for a user. The first token creates the user."""
    new: NewUser = call.body
    seconds = None if new.days is None else new.days * 86400
    secret, token = users.add_token(call.database, new.user_name, new.scope, expires_s=seconds, label=new.label)
    call.note("user.added", new.user_name, scope=new.scope.value)
    return NewToken(token=secret, info=TokenInfo.of(token))


@operations.delete("/users/{user}", Changed)
def revoke_user(call: WebCall) -> Changed:
    """Revokes all tokens and sessions of a user."""
    users.revoke(call.database, call.path["user"])
    return Changed(subject=call.note("user.revoked", call.path["user"]))


@operations.get("/actions", list[UserAction], Scope.ADMINISTER)
def list_actions(call: WebCall) -> Sequence[UserAction]:
    """Lists what users did through this server, newest first."""
    return users.actions(call.database)
