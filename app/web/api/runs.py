"""Operations on runs: submit, list, show, cancel, retry, pause."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from pydantic import AfterValidator, Discriminator, Field, Tag
from starlette.concurrency import run_in_threadpool

from app.client import Run
from app.errors import NotAllowed, OptionInvalid
from app.evaluation import Submission
from app.installation import RunNotes
from app.ledger import pauses, results, users
from app.ledger.events import EventRecord
from app.ledger.results import Progress, RunStatus
from app.ledger.users import Scope
from app.models.graphs import MOST_UPSTREAM, ArtifactReference
from app.models.groups import MOST_REPLICAS, Adaptive
from app.models.kinds import Purpose
from app.models.outcome import TaskResult
from app.models.overrides import EnvironmentOverrides, LimitOverrides
from app.models.spec import MOST_PRIORITY, AgentTask, LabelText, Mode, ModelChoice, PlainText
from app.models.states import TaskState
from app.models.wire import Wire
from app.web.api.operation import Operations
from app.web.calls import WebCall
from app.web.submitting import permitted, permitted_model, refuse_host_tasks, refuse_priority

operations = Operations()

_BREATH_S = 0.5
"""Seconds between two queries for the end of a task that is waited for."""
MOST_TASKS = 1000
"""Most tasks in one answer."""
MOST_REASON = 200
"""Most characters of a reason, which is stored for each task."""
EachOnce = Annotated[tuple[UUID, ...], AfterValidator(lambda ids: tuple(dict.fromkeys(ids)))]
"""Ids in the given order, without repetitions."""


Replicas = Annotated[int, Field(le=MOST_REPLICAS)] | tuple[int, int]
"""A number of replicas; two numbers: the fewest and the most of a training group."""


class AcceptedRun(Wire):
    """A run and its tasks, in the order of submission."""

    run_id: UUID
    task_ids: tuple[UUID, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, run: Run) -> AcceptedRun:
        return cls(
            run_id=run.id,
            task_ids=tuple(handle.task_id for handle in run.handles),
            names=tuple(handle.name for handle in run.handles),
        )


class EarlierTask(Wire):
    """A task of the same user that must end before."""

    task_id: UUID


class DatasetRun(Wire):
    """A dataset by its name, as `megaflow submit` takes it."""

    submission: Submission
    idempotency_key: PlainText | None = Field(default=None, max_length=200)
    after: tuple[EarlierTask, ...] = Field(default=(), max_length=MOST_UPSTREAM)


class InlineRun(Wire):
    """Tasks given inline, as `MegaFlow.enqueue_many` takes them."""

    tasks: tuple[AgentTask, ...] = Field(min_length=1)
    agent: PlainText = Field(max_length=200)
    mode: Mode = Mode.AUTO
    model: ModelChoice | str | None = None
    replicas: Replicas = 1
    quorum: int | None = None
    hedge_after: str | None = None
    name: LabelText = ""
    priority: int = Field(default=0, ge=-MOST_PRIORITY, le=MOST_PRIORITY)
    purpose: Purpose = Purpose.EVALUATION
    idempotency_key: PlainText | None = Field(default=None, max_length=200)
    resource_class: str = "standard"
    available_at: datetime | None = None
    deadline_at: datetime | None = None
    budget_usd: float | None = Field(default=None, gt=0)
    max_running: int | None = Field(default=None, ge=1, le=1_000_000)
    overrides: EnvironmentOverrides | None = None
    limits: LimitOverrides | None = None
    agent_args: dict[str, str] | None = None
    rewards: dict[str, float] | None = None
    record_diffs: bool = False
    include_quarantined: bool = False
    after: tuple[EarlierTask, ...] = Field(default=(), max_length=MOST_UPSTREAM)
    inputs: dict[str, ArtifactReference] = {}  # by path in the environment
    user_name: LabelText = ""  # set by administrators, who may submit for others


class RunsQuery(Wire):
    """limit: most rows; before: an id that the last page returned."""

    limit: int = Field(default=50, ge=1, le=MOST_TASKS)
    before: UUID | None = None


class TaskPage(Wire):
    """limit: most tasks; after: the last id of the page before; state: only tasks in this one."""

    limit: int = Field(default=200, ge=1, le=MOST_TASKS)
    after: UUID | None = None
    state: TaskState | None = None


class Reason(Wire):
    """A reason, for the trail of what users did."""

    reason: PlainText = Field(default="", max_length=MOST_REASON)


class Selected(Reason):
    """Tasks by their ids."""

    task_ids: EachOnce = Field(min_length=1, max_length=10_000)


class Waited(Wire):
    """Tasks by their ids, and how long to wait for the end of one, in seconds."""

    task_ids: EachOnce = Field(min_length=1, max_length=100_000)
    timeout_s: float = Field(default=25.0, ge=0, le=30)


class Named(Wire):
    """run, task: a name, an id or its end, `latest`; a task: RUN/TASK, NAME#REPLICA as well."""

    run: str | None = None
    task: str | None = None


class SeveralRuns(Wire):
    """run: one or several."""

    run: tuple[str, ...] = Field(min_length=1, max_length=100)


class Moved(Wire):
    """The tasks that an operation concerned."""

    task_ids: tuple[UUID, ...]


def _kind_of_run(given: Any) -> str:
    named = isinstance(given, DatasetRun) or (isinstance(given, dict) and "submission" in given)
    return "dataset" if named else "tasks"


NewRunBody = Annotated[
    Annotated[DatasetRun, Tag("dataset")] | Annotated[InlineRun, Tag("tasks")], Discriminator(_kind_of_run)
]


@operations.post("/runs", AcceptedRun, body=NewRunBody, usual=InlineRun)
def submit_run(call: WebCall) -> AcceptedRun:
    """Submits a dataset by its name, or tasks inline, as one run: all tasks or none."""
    body = call.body
    if isinstance(body, DatasetRun):
        user = _user(call, body.submission.user_name if "user_name" in body.submission.model_fields_set else "")
        refuse_priority(call, body.submission.priority)
        submission = permitted(call, body.submission).model_copy(update={"user_name": user})
        run = call.flow.submit(submission, idempotency_key=body.idempotency_key, after=body.after)
    else:
        options: dict[str, Any] = {name: getattr(body, name) for name in InlineRun.model_fields}
        tasks, options["user_name"] = options.pop("tasks"), _user(call, body.user_name)
        refuse_host_tasks(call, tasks, body.overrides)
        refuse_priority(call, body.priority)
        options["model"] = permitted_model(call, body.model)
        if isinstance(body.replicas, tuple):
            options["replicas"] = Adaptive(*body.replicas)
        run = call.flow.enqueue_many(tasks, **options)
    call.note("run.submitted", run.id, tasks=len(run.handles))
    return AcceptedRun.of(run)


def _user(call: WebCall, asked: str) -> str:
    """Returns the run's user: the caller, or another one if an administrator names one. Raises: OptionInvalid."""
    if not asked or asked == call.caller.user_name:
        return call.caller.user_name
    if not call.caller.administers:
        raise OptionInvalid(
            f"expected the user {call.caller.user_name!r} of the token, found {asked!r}; only an administrator submits"
            " for others; nothing was submitted"
        )
    return asked


@operations.get("/runs", list[RunStatus], query=RunsQuery)
def list_runs(call: WebCall) -> Sequence[RunStatus]:
    """Lists runs, newest first: the caller's, or all for an administrator."""
    return results.runs(call.database, call.query.limit, user_name=call.whose, before=call.query.before)


@operations.get("/find", UUID, query=Named)
def find_id(call: WebCall) -> UUID:
    """Finds the id of the run or the task with a name: names may hold slashes, which paths cannot."""
    if (call.query.run is None) == (call.query.task is None):
        raise OptionInvalid("expected either `run` or `task`")
    return call.task(call.query.task) if call.query.run is None else call.run(call.query.run)


@operations.get("/runs/{run}", RunStatus)
def show_run(call: WebCall) -> RunStatus:
    """Shows a run's counts by state, and scores with their denominator."""
    return call.flow.status(call.run())


@operations.get("/progress", Progress, query=SeveralRuns)
def show_progress_of_several(call: WebCall) -> Progress:
    """Counts the tasks of several runs together by what they do now."""
    return results.progress_of(call.database, [call.run(name) for name in call.query.run])


@operations.get("/runs/{run}/notes", RunNotes)
def show_run_notes(call: WebCall) -> RunNotes:
    """Shows notes on a run's score: interval, provenance, open networks, images that were not validated."""
    return call.flow.installation.notes(call.run())


@operations.get("/runs/{run}/tasks", list[TaskResult], query=TaskPage)
def list_tasks(call: WebCall) -> list[TaskResult]:
    """Lists a run's tasks with their attempts, in the order of acceptance, a page at a time."""
    page: TaskPage = call.query
    ids = results.task_ids(call.database, call.run(), after=page.after, state=page.state, limit=page.limit)
    return results.results(call.database, ids)


@operations.get("/runs/{run}/task-ids", list[UUID])
def list_task_ids(call: WebCall) -> list[UUID]:
    """Lists the ids of all tasks of a run, in the order of acceptance."""
    return results.task_ids(call.database, call.run())


@operations.post("/runs/{run}/cancel", Moved, body=Reason)
def cancel_run(call: WebCall) -> Moved:
    """Cancels all tasks of a run that have not ended. Returns these tasks."""
    run_id = call.run()
    ids = results.task_ids(call.database, run_id)
    under_way = _under_way(call, ids)
    call.flow.cancel(ids)
    call.note("run.cancelled", run_id, call.body.reason, tasks=len(under_way))
    return Moved(task_ids=tuple(under_way))


@operations.post("/runs/{run}/retry", Moved, body=Reason)
def retry_run(call: WebCall) -> Moved:
    """Runs tasks again that could not be scored, or were cancelled."""
    run_id = call.run()
    moved = call.flow.retry(results.task_ids(call.database, run_id))
    call.note("run.retried", run_id, call.body.reason, tasks=len(moved))
    return Moved(task_ids=tuple(moved))


@operations.post("/runs/{run}/pause", pauses.Change, body=Reason)
def pause_run(call: WebCall) -> pauses.Change:
    """Pauses a run: no more of its tasks are admitted."""
    run_id = call.run()
    change = pauses.pause(call.database, str(run_id), call.body.reason)
    call.note("run.paused", run_id, call.body.reason)
    return change


@operations.post("/runs/{run}/resume", pauses.Change, body=Reason)
def resume_run(call: WebCall) -> pauses.Change:
    """Resumes a paused run: its tasks are admitted again."""
    run_id = call.run()
    _refuse_paused_by_others(call, run_id)
    change = pauses.resume(call.database, str(run_id))
    call.note("run.resumed", run_id, call.body.reason)
    return change


def _refuse_paused_by_others(call: WebCall, run_id: UUID) -> None:
    """Raises: NotAllowed: an administrator paused it, so only an administrator may resume it."""
    if not call.caller.administers and users.others_paused(call.database, run_id, call.caller.user_name):
        raise NotAllowed(
            "expected a run that its own user paused, found one that an administrator paused as well; ask an"
            " administrator to resume it; nothing was changed"
        )


@operations.get("/tasks/{task}", TaskResult)
def show_task(call: WebCall) -> TaskResult:
    """Shows a task with all its attempts, verdicts and artifacts."""
    return results.results(call.database, [call.task()])[0]


@operations.post("/tasks/cancel", Moved, body=Selected)
def cancel_tasks(call: WebCall) -> Moved:
    """Cancels those of the tasks that have not ended. Returns them."""
    ids = list(call.body.task_ids)
    call.check_tasks(ids)
    under_way = _under_way(call, ids)
    call.flow.cancel(ids)
    call.note_each("task.cancelled", under_way, call.body.reason)
    return Moved(task_ids=tuple(under_way))


def _under_way(call: WebCall, ids: list[UUID]) -> list[UUID]:
    ended = set(results.ended(call.database, ids))
    return [one for one in ids if one not in ended]


@operations.post("/tasks/retry", Moved, body=Selected)
def retry_tasks(call: WebCall) -> Moved:
    """Puts tasks that could not be scored, or were cancelled, back into the queue."""
    ids = list(call.body.task_ids)
    call.check_tasks(ids)
    moved = call.flow.retry(ids)
    call.note_each("task.retried", moved, call.body.reason)
    return Moved(task_ids=tuple(moved))


@operations.post("/tasks/wait", Moved, Scope.READ, body=Waited)
async def wait_for_tasks(call: WebCall) -> Moved:
    """Waits until one of the tasks has ended. Returns all that have; none after `timeout_s`."""
    ids, until = list(call.body.task_ids), time.monotonic() + call.body.timeout_s
    await run_in_threadpool(call.check_tasks, ids)
    async with aclosing(call.services.live.changes()) as changes:
        while True:
            ended = await run_in_threadpool(results.ended, call.database, ids)
            if ended or (left_s := until - time.monotonic()) <= 0:
                return Moved(task_ids=tuple(ended))
            try:
                await asyncio.wait_for(anext(changes), left_s)
                await asyncio.sleep(max(0.0, min(_BREATH_S, until - time.monotonic())))
            except TimeoutError:
                continue
            except StopAsyncIteration:  # the server ends
                return Moved(task_ids=())


@operations.get("/tasks/{task}/events", list[EventRecord])
def list_task_events(call: WebCall) -> list[EventRecord]:
    """Lists all events of a task, in order."""
    return call.flow.installation.task_events(call.task())


@operations.post("/tasks/results", list[TaskResult], Scope.READ, body=Selected)
def task_results(call: WebCall) -> list[TaskResult]:
    """Returns tasks with their attempts, each once, in the requested order."""
    ids = list(call.body.task_ids)
    call.check_tasks(ids)
    return results.results(call.database, ids)
