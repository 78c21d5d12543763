"""The Python enqueue API for producers. It needs neither Docker nor a worker's dependencies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypedDict, Unpack
from uuid import UUID

from app.errors import DatabaseUnavailable, SpecInvalid, WaitTimeout
from app.ledger import results
from app.ledger.database import Database
from app.ledger.outcomes import Outcomes
from app.ledger.results import RunStatus
from app.models.graphs import ArtifactReference, ComesAfter, KnownTask
from app.models.groups import Adaptive, GroupRules, first_replicas
from app.models.kinds import Purpose
from app.models.outcome import ArtifactKind, TaskResult
from app.models.overrides import EnvironmentOverrides, LimitOverrides
from app.models.spec import AgentTask, Bundle, Mode, ModelChoice, TaskSpec
from app.models.states import TaskState
from app.settings import Settings, load

if TYPE_CHECKING:
    from app.agents.catalogue import Traits
    from app.evaluation import Submission
    from app.experience.hand_out import Experience
    from app.ledger import stream
    from app.ledger.accept import NewRun

# What accepts, cancels and follows is imported where it is used: listing runs needs a third of the modules.


class TaskOptions(TypedDict, total=False):
    """How tasks are to run, for `MegaFlow.enqueue` and `enqueue_many`."""

    mode: Mode | str  # `ephemeral`, `persistent` or `auto`
    model: ModelChoice | str | None  # its name at the settings' endpoint or in `megaflow models`; `replay`: scripted
    priority: int  # higher goes first
    user_name: str  # on whose account
    idempotency_key: str | None  # the same key submits once
    resource_class: str  # what `megaflow classes` lists
    available_at: datetime | None  # not before; with a time zone, as the next
    deadline_at: datetime | None  # what has not ended by then ends as `expired`
    overrides: EnvironmentOverrides | None  # go before what the task says of its environment
    limits: LimitOverrides | None  # go before what the task says of its limits
    agent_args: Mapping[str, str] | None  # for the agent's adapter; `megaflow agents` has the keys that each takes
    rewards: Mapping[str, float] | None  # by end reason or `not_submitted`, whatever the tests say
    include_quarantined: bool  # also tasks that a validation put in quarantine
    after: Sequence[KnownTask]  # handles: begins when they have succeeded; what does not succeed cancels it
    inputs: Mapping[str, ArtifactReference]  # artifacts of earlier tasks, as files at these paths; comes after them


class MegaFlow:
    """A connection to one installation. Threads may share it; close it, or use it as a context manager.

    >>> with MegaFlow() as flow:
    ...     run = flow.enqueue_many(tasks, agent="mini-swe-agent", model="my-model", replicas=16)
    ...     for handle in as_completed(run.handles):
    ...         print(handle.name, handle.result().reward)
    """

    def __init__(self, settings: Settings | None = None, database: Database | None = None) -> None:
        """Settings come from the environment when none are given. Connects when first used.

        database: another owner's, who closes it; None: one of its own.

        Raises: SettingsInvalid.
        """
        self.settings = settings or load()
        self._owns_database = database is None
        self.database = database or Database(self.settings.database())
        self._outcomes = Outcomes(self.database)

    def enqueue(self, task: AgentTask, *, agent: str, **options: Unpack[TaskOptions]) -> Handle:
        """Accept one task. When this returns, the task survives the loss of Redis, of every worker and the scheduler.

        agent: a name that `megaflow agents` lists. A key that was used before returns the earlier task's handle.

        after: tasks of the same user. None begins before they have succeeded, whatever their reward; when one fails or
        is cancelled, what comes after it is cancelled. inputs: `{"/inputs/first.diff": handle.artifact("patch")}`.

        Raises: SpecInvalid, UnknownName, SettingsInvalid (the manifest of an external agent is wrong), QuotaExceeded
            (too many of the user's wait already), ArtifactStoreUnavailable and ArtifactMissing (the compose file of a
            task is read from there), IdempotencyConflict (the key belongs to another task): nothing was accepted;
            DatabaseUnavailable: it may have been accepted, and the same idempotency_key finds out.
        """
        return self.enqueue_many([task], agent=agent, name=task.name, **options).handles[0]

    def enqueue_many(
        self,
        tasks: Iterable[AgentTask],
        *,
        agent: str,
        mode: Mode | str = Mode.AUTO,
        model: ModelChoice | str | None = None,
        replicas: int | Adaptive = 1,
        quorum: int | None = None,  # as the next, of training runs: `GroupRules`
        hedge_after: str | None = None,
        name: str = "",
        priority: int = 0,
        user_name: str = "default",
        purpose: Purpose | str = Purpose.EVALUATION,  # or `training`, `synthesis`
        idempotency_key: str | None = None,
        resource_class: str = "standard",
        available_at: datetime | None = None,
        deadline_at: datetime | None = None,
        budget_usd: float | None = None,  # of all model calls; then the run is paused
        max_running: int | None = None,  # attempts at once
        overrides: EnvironmentOverrides | None = None,
        limits: LimitOverrides | None = None,
        agent_args: Mapping[str, str] | None = None,
        rewards: Mapping[str, float] | None = None,
        include_quarantined: bool = False,
        after: Sequence[KnownTask] = (),  # as the next: all of these tasks wait for all of those
        inputs: Mapping[str, ArtifactReference] | None = None,
    ) -> Run:
        """Accept tasks as one run, all or none; each becomes a group of `replicas` tasks. Raises: as `enqueue`."""
        from app.ledger.accept import NewRun
        from app.submission import size_of, specs_for

        new = NewRun(
            specs=specs_for(
                tasks,
                agent=agent,
                mode=mode,
                model=model,
                agents=self._known_agents(),
                resource_class=resource_class,
                overrides=overrides,
                limits=limits,
                agent_args=agent_args,
                rewards=rewards,
                size=size_of(self.settings),
            ),
            replicas=first_replicas(replicas),
            groups=GroupRules.of(replicas, quorum, hedge_after),
            name=name,
            user_name=user_name,
            purpose=_purpose(purpose),
            priority=priority,
            idempotency_key=idempotency_key,
            available_at=available_at,
            deadline_at=deadline_at,
            budget_usd=budget_usd,
            max_running=max_running,
            include_quarantined=include_quarantined,
        )
        return self.accept(self._completed(new, ComesAfter.of(after, inputs)))

    def submit(
        self,
        submission: Submission,
        *,
        idempotency_key: str | None = None,
        check: Callable[[ModelChoice], None] | None = None,
        after: Sequence[KnownTask] = (),
    ) -> Run:
        """Read a dataset and accept its tasks as one run; all of them or none. check: called with each model first.

        Raises: DatasetInvalid; as `enqueue` and `check`.
        """
        from app.evaluation import run_of

        new = run_of(submission, self.settings, self.database, idempotency_key)
        return self.accept(replace(new, upstream=ComesAfter.of(after)), check=check)

    def trial(self, submission: Submission, *, check: Callable[[ModelChoice], None] | None = None) -> list[TaskSpec]:
        """What `submit` would accept now, with everything but accepting it. Raises: as `submit`."""
        from app.evaluation import run_of

        return list(self.try_out(run_of(submission, self.settings, self.database), check=check).specs)

    def accept(self, new: NewRun, *, check: Callable[[ModelChoice], None] | None = None) -> Run:
        """Accept a run made of specs, which may be of several agents. Raises: as `enqueue` and `check`."""
        from app.ledger import accept

        accepted = accept.accept(self.database, self._checked(new, check), self.settings)
        return self.run(accepted.run_id, accepted.task_ids, accepted.names)

    def try_out(self, new: NewRun, *, check: Callable[[ModelChoice], None] | None = None) -> NewRun:
        """What `accept` would write now, with everything but writing it. Raises: as `accept`."""
        from app.ledger import classes

        new = self._checked(new, check)
        with self.database.begin() as connection:
            classes.check(connection, self.settings, {(spec.mode, spec.resource_class) for spec in new.specs})
        return new

    def _checked(self, new: NewRun, check: Callable[[ModelChoice], None] | None) -> NewRun:
        """The run as its purpose wants it. Raises: as `enqueue` and `check`."""
        from app.submission import for_purpose, refuse_quarantined, refuse_unanswered

        new = for_purpose(new, self.database)
        refuse_unanswered(new.specs, self.settings, self.database)
        if not new.include_quarantined:
            refuse_quarantined(new.specs, self.database)
        for model in {spec.model for spec in new.specs if spec.model is not None and spec.agent != "replay"}:
            if check is not None:
                check(model)
        if not new.specs:
            raise SpecInvalid("expected at least one task, found none; nothing was submitted")
        if new.replicas < 1:
            raise SpecInvalid(f"expected replicas >= 1, found {new.replicas}; nothing was submitted")
        return new

    def _known_agents(self) -> Mapping[str, Traits]:
        from app.agents.external import known_agents

        return known_agents(self.settings)

    def _completed(self, new: NewRun, upstream: ComesAfter) -> NewRun:
        """With what it comes after; its compose projects are right. Raises: as `enqueue`."""
        from app.submission import refuse_wrong_projects

        refuse_wrong_projects([spec.task for spec in new.specs], self._stored)
        return replace(new, upstream=upstream)

    def _stored(self, bundle: Bundle) -> bytes:
        """The tar of a folder in the artifact store. Raises: ArtifactMissing, ArtifactStoreUnavailable."""
        from app.artifacts import open_store
        from app.artifacts.bundles import fetch_bundle

        store = open_store(self.settings.artifacts(), endpoint_url=self.settings.s3_endpoint_url)
        return fetch_bundle(store, bundle)

    def run(self, run_id: UUID, task_ids: Sequence[UUID] | None = None, names: Sequence[str] | None = None) -> Run:
        """A run by its id. Raises: UnknownName."""
        if task_ids is None:
            self.status(run_id)
            task_ids = results.task_ids(self.database, run_id)
        labels = names or [""] * len(task_ids)
        handles = [Handle(self, i, run_id, name) for i, name in zip(task_ids, labels, strict=True)]
        return Run(self, run_id, handles)

    def status(self, run_id: UUID) -> RunStatus:
        """Raises: UnknownName."""
        return results.run_status(self.database, run_id)

    def experience(
        self,
        run: Run,
        *,
        policy: str,
        consumer: str,
        quorum: int | None = None,
        drop_equal: bool = False,
        max_staleness: int | None = None,
        lease_s: float = 600.0,
    ) -> Experience:
        """A training run's samples, handed out to one trainer. Needs the extras `model` and `datasets`.

        policy: the model's stable name. quorum: replicas that complete a group, where the run was submitted without
        one; the others are superseded. drop_equal: leave out groups whose rewards are all equal. max_staleness:
        versions between the live one and the oldest in a group; tasks do not run further ahead. lease_s: see
        `Experience`.

        Raises: UnknownName; SampleRefused: the run's purpose is not `training`; ArtifactStoreUnavailable.
        """
        from app.artifacts import open_store
        from app.experience.hand_out import Experience
        from app.ledger.experience import ExperienceRun

        store = open_store(self.settings.artifacts(), endpoint_url=self.settings.s3_endpoint_url)
        how = ExperienceRun(run.id, policy, quorum=quorum, drop_equal=drop_equal, max_staleness=max_staleness)
        return Experience(self.database, store, how, consumer=consumer, lease_s=lease_s)

    def check_model(self, model: ModelChoice | str) -> list[str]:
        """Have the gateway check the model's endpoint and key now; returns what could not be checked.

        `enqueue` does not do this: a producer may submit before any gateway runs.

        Raises: ModelEndpointUnavailable: no connection, a refused or missing key, an unknown model, or no gateway
            answers; DatabaseUnavailable.
        """
        from app.model_service.checking import check_model

        chosen = ModelChoice(name=model) if isinstance(model, str) else model
        return check_model(self.settings, self.database, chosen)

    def cancel(self, task_ids: Sequence[UUID]) -> None:
        """Ask tasks to end. What runs is told at once; what waits ends now; what has ended stays as it is."""
        from app.ledger import tasks
        from app.stopping import nudge

        running = tasks.cancel(self.database, task_ids)
        if running:
            nudge(self.settings, running)

    def retry(self, task_ids: Sequence[UUID]) -> list[UUID]:
        """Put tasks that could not be scored, or were cancelled, back in line; returns those moved."""
        from app.ledger import tasks

        return tasks.retry(self.database, task_ids)

    def events(
        self,
        position: str = "now",
        *,
        follow: bool = False,
        kinds: Sequence[str] = (),
        run_id: UUID | None = None,
        task_id: UUID | None = None,
        stop: threading.Event | None = None,
        outage: Callable[[DatabaseUnavailable], object] | None = None,
    ) -> Iterator[stream.StreamedEvent]:
        """Facts after a position (`start`, `now`, or one that came with a fact): at least once, in order for each task.

        kinds: whole ones, or beginnings that end in a dot. With `follow`, goes on until `stop` is set; an outage of
        PostgreSQL is waited out, and `outage` hears of it.

        Raises: SpecInvalid: no such position; DatabaseUnavailable.
        """
        from app.ledger import stream

        wanted, at = stream.EventFilter(tuple(kinds), run_id, task_id), stream.place(self.database, position)
        if follow:
            yield from stream.follow(self.database, at, stop or threading.Event(), wanted, outage=outage)
            return
        page = stream.read(self.database, at, stream.PAGE, wanted)
        yield from page.events
        while len(page.events) == stream.PAGE:
            page = stream.read(self.database, page.position, stream.PAGE, wanted)
            yield from page.events

    def wait_any(self, task_ids: Iterable[UUID], timeout: float | None = None) -> list[UUID]:
        """Block until one of the tasks has ended, by event; those that have, or none after `timeout` seconds."""
        return self._outcomes.wait_any(set(task_ids), timeout)

    def close(self) -> None:
        """Release the connections. Accepted tasks go on."""
        self._outcomes.close()
        if self._owns_database:
            self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Handle:
    """One accepted task."""

    flow: MegaFlow
    task_id: UUID
    run_id: UUID
    name: str = ""

    def status(self) -> TaskState:
        """Where it stands now."""
        return results.state_of(self.flow.database, self.task_id)

    def result(self, timeout: float | None = None) -> TaskResult:
        """Wait for the end: verdict, end reason, artifacts, phase times, attempts. `timeout` in seconds, or for ever.

        A failed or cancelled task is a result too (`state`). Raises: WaitTimeout: it has not ended yet and goes on.
        """
        if not self.flow.wait_any([self.task_id], timeout):
            raise WaitTimeout(f"task {self.name or self.task_id} had not ended after {timeout} s; it goes on")
        return results.results(self.flow.database, [self.task_id])[0]

    def cancel(self) -> None:
        """Ask it to end; its containers go with it, and so do the tasks that wait for it."""
        self.flow.cancel([self.task_id])

    def artifact(self, kind: ArtifactKind | str) -> ArtifactReference:
        """One of its artifacts (`patch`, …), as an input of a task that comes after. Raises: UnknownName: no such."""
        return ArtifactReference.of(self.task_id, kind)


@dataclass(frozen=True, slots=True)
class Run:
    """Tasks accepted together; `handles` are without the replicas that groups of a training run get later."""

    flow: MegaFlow
    id: UUID
    handles: list[Handle]

    def status(self) -> RunStatus:
        """Counts by state, and the scores with their denominator."""
        return self.flow.status(self.id)

    def results(self, timeout: float | None = None) -> list[TaskResult]:
        """Wait for all; results in the order of submission. Raises: WaitTimeout."""
        for _ in as_completed(self.handles, timeout):
            pass
        return results.results(self.flow.database, [handle.task_id for handle in self.handles])

    def cancel(self) -> None:
        """Ask all of them to end, and the replicas that groups have got since."""
        self.flow.cancel(results.task_ids(self.flow.database, self.id))


def as_completed(handles: Iterable[Handle], timeout: float | None = None) -> Iterator[Handle]:
    """Handles in the order in which their tasks end. All must be of one `MegaFlow`.

    Raises: WaitTimeout when `timeout` seconds have passed before the last.
    """
    left = {handle.task_id: handle for handle in handles}
    until = None if timeout is None else time.monotonic() + timeout
    while left:
        flow = next(iter(left.values())).flow
        patience = None if until is None else max(0.0, until - time.monotonic())
        ended = flow.wait_any(left, patience)
        if not ended:
            raise WaitTimeout(f"{len(left)} tasks had not ended after {timeout} s; they go on")
        for task_id in ended:
            yield left.pop(task_id)


def _purpose(given: Purpose | str) -> Purpose:
    try:
        return Purpose(given)
    except ValueError:
        raise SpecInvalid(f"unknown purpose {given!r}; known: {', '.join(Purpose)}; nothing was submitted") from None
