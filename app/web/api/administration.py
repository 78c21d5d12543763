"""Operations of administrators: limits, quotas, schedules; and what a token may do and has used."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import structlog
from pydantic import Field

from app.errors import NotAllowed
from app.evaluation import Submission
from app.ledger import limits, quotas, schedules
from app.ledger.limits import Use
from app.ledger.model_usage import UsageRow
from app.ledger.quotas import Quota, QuotaChanges, QuotaUsage
from app.ledger.schedules import Schedule
from app.ledger.users import Scope
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
    """by: what a row is about; run, user: only these."""

    by: UsageBy = "run"
    run: str | None = None
    user: str | None = None


class WhyQuery(Wire):
    """A reason, stored in the trail."""

    reason: PlainText = Field(default="", max_length=1000)


class LimitChange(WhyQuery):
    """capacity: of the limit; None: the default."""

    capacity: float | None = Field(ge=0)


class QuotaChange(QuotaChanges):
    """The fields to change: a missing field stays as it is, None removes the limit."""

    reason: PlainText = Field(default="", max_length=1000)


class NewSchedule(WhyQuery):
    """A recurring evaluation: `cron` has five fields, in UTC."""

    name: str = Field(min_length=1, max_length=100)
    cron: str
    submission: Submission
    misfire: Literal["skip", "once"] = "skip"


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
    return call.flow.installation.usage(query.by, run_id=run_id, user=call.whose or query.user)


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
