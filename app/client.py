"""Defines the Python API for producers. It needs neither Docker nor a worker's dependencies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack
from uuid import UUID

from app.errors import DatabaseUnavailable, NotRemote, SpecInvalid, WaitTimeout
from app.installation import LedgerInstallation
from app.ledger.database import Database
from app.ledger.results import RunStatus
from app.models.graphs import ArtifactReference, ComesAfter, KnownTask
from app.models.groups import Adaptive, GroupRules, first_replicas
from app.models.kinds import Purpose
from app.models.outcome import ArtifactKind, TaskResult
from app.models.overrides import EnvironmentOverrides, LimitOverrides
from app.models.spec import AgentTask, Mode, ModelChoice, TaskSpec
from app.models.states import TaskState
from app.models.task_options import TaskOptions
from app.settings import Settings, load

if TYPE_CHECKING:
    import pandas

    from app.artifacts import ArtifactStore
    from app.evaluation import Submission
    from app.experience.hand_out import Experience
    from app.ledger import stream
    from app.ledger.accept import Accepted, NewRun
    from app.remote import RemoteInstallation

# Modules to accept, cancel and follow are imported where they are used: listing runs needs a third of the modules.


_OF_SPECS = ("agent", "mode", "model", "resource_class", "overrides", "limits", "agent_args", "rewards", "record_diffs")
_APART = ("self", "idempotency_key", "after", "inputs")
ModelCheck = Callable[[ModelChoice], None]


class MegaFlow:
    """A connection to one installation. Threads may share it; close it, or use it as a context manager.

    >>> with MegaFlow() as flow:
    ...     run = flow.enqueue_many(tasks, agent="mini-swe-agent", model="my-model", replicas=16)
    ...     for handle in as_completed(run.handles):
    ...         print(handle.name, handle.result().reward)
    """

    def __init__(
        self,
        settings: Settings | None = None,
        database: Database | None = None,
        *,
        server: str | None = None,
        token: str | None = None,
    ) -> None:
        """Takes the settings from the environment if none are given. Connects at first use.

        database: a database that the caller closes; None: a new one. server: the URL of another machine's web server;
        None: the setting of that name, else the ledger is used directly. token: for that server; None: the setting.

        Raises: SettingsInvalid; NotSignedIn: a server without a token.
        """
        self.settings = settings or load()
        url = server or (None if database is not None else self.settings.server)
        self._owns_database = database is None
        self.installation: LedgerInstallation | RemoteInstallation
        if url is not None:
            from app.remote import RemoteInstallation

            known = self.settings.token
            self.installation = RemoteInstallation(url, token or (known.get_secret_value() if known else ""))
        else:
            self.installation = LedgerInstallation(self.settings, database or Database(self.settings.database()))

    @property
    def server(self) -> str | None:
        """URL of the web server in use; None: the ledger is used directly."""
        return None if isinstance(self.installation, LedgerInstallation) else self.installation.web_base

    @property
    def database(self) -> Database:
        """The ledger's database. Raises: NotRemote: a web server is used instead."""
        return self.ledger.database

    @property
    def store(self) -> ArtifactStore:
        """Artifact store. Raises: NotRemote, SettingsInvalid, ArtifactStoreUnavailable."""
        return self.ledger.store

    @property
    def ledger(self) -> LedgerInstallation:
        """Installation whose ledger is used directly. Raises: NotRemote."""
        if not isinstance(self.installation, LedgerInstallation):
            raise NotRemote(
                f"expected the installation's own machine, found the server {self.installation.web_base}: this has no"
                " form over its API; call it there, without `server`"
            )
        return self.installation

    def enqueue(self, task: AgentTask, *, agent: str, **options: Unpack[TaskOptions]) -> Handle:
        """Accepts one task. After it returns, the task survives the loss of Redis, of all workers and of the scheduler.

        agent: a name that `megaflow agents` lists. A known idempotency key returns the earlier task's handle.

        after: tasks of the same user. The task begins after they have succeeded, whatever their reward. When one fails
        or is cancelled, this task is cancelled. inputs: `{"/inputs/first.diff": handle.artifact("patch")}`.

        Raises: SpecInvalid, UnknownName, SettingsInvalid (the manifest of an external agent is wrong), QuotaExceeded
            (too many tasks of the user wait already), ArtifactStoreUnavailable and ArtifactMissing (a task's compose
            file is read from there), IdempotencyConflict (the key belongs to another task): nothing was accepted;
            DatabaseUnavailable: it may have been accepted; call again with the same idempotency_key to find out.
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
        quorum: int | None = None,  # this and hedge_after: for training runs, see `GroupRules`
        hedge_after: str | None = None,
        name: str = "",
        priority: int = 0,
        user_name: str = "default",
        purpose: Purpose | str = Purpose.EVALUATION,  # or `training`, `synthesis`
        idempotency_key: str | None = None,
        resource_class: str = "standard",
        available_at: datetime | None = None,
        deadline_at: datetime | None = None,
        budget_usd: float | None = None,  # for all model calls; then the run is paused
        max_running: int | None = None,  # attempts at once
        overrides: EnvironmentOverrides | None = None,
        limits: LimitOverrides | None = None,
        agent_args: Mapping[str, str] | None = None,
        rewards: Mapping[str, float] | None = None,
        record_diffs: bool = False,
        include_quarantined: bool = False,
        after: Sequence[KnownTask] = (),  # with inputs: all tasks of the run wait for all of these
        inputs: Mapping[str, ArtifactReference] | None = None,
    ) -> Run:
        """Accepts tasks as one run, all or none; each becomes a group of `replicas` tasks. Raises: as `enqueue`."""
        options, upstream = locals(), ComesAfter.of(after, inputs)
        if (remote := self._remote()) is not None:
            given = {name: one for name, one in options.items() if name not in _APART}
            return self._accepted(remote.enqueue(given, idempotency_key, upstream))
        from app.agents.external import known_agents
        from app.ledger.accept import NewRun
        from app.submission import size_of, specs_for

        how = {name: options[name] for name in _OF_SPECS}
        new = NewRun(
            specs=specs_for(tasks, agents=known_agents(self.settings), size=size_of(self.settings), **how),
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
        return self.accept(replace(self.ledger.with_projects(new), upstream=upstream))

    def submit(
        self,
        submission: Submission,
        *,
        idempotency_key: str | None = None,
        check: ModelCheck | None = None,
        after: Sequence[KnownTask] = (),
    ) -> Run:
        """Reads a dataset and accepts its tasks as one run, all or none. check: called first with each model.

        Raises: DatasetInvalid; as `enqueue` and `check`.
        """
        if (remote := self._remote()) is not None:
            if check is not None and submission.model is not None:
                check(submission.model)
            return self._accepted(remote.submit(submission, idempotency_key, ComesAfter.of(after)))
        from app.evaluation import run_of

        new = run_of(submission, self.settings, self.database, idempotency_key)
        return self.accept(replace(new, upstream=ComesAfter.of(after)), check=check)

    def trial(self, submission: Submission, *, check: ModelCheck | None = None) -> list[TaskSpec]:
        """Returns the specs that `submit` would accept now; accepts nothing. Raises: as `submit`."""
        from app.evaluation import run_of

        return list(self.try_out(run_of(submission, self.settings, self.database), check=check).specs)

    def schedule(
        self, name: str, cron: str, submission: Submission, misfire: str, check: ModelCheck | None, reason: str = ""
    ) -> int:
        """Makes beat submit a dataset at each due time; returns the number of its tasks now. Raises: as `submit`."""
        if (remote := self._remote()) is not None:
            return remote.add_schedule(name, cron, submission, misfire, reason)
        tasks = self.trial(submission, check=check)
        self.ledger.add_schedule(name, cron, submission, misfire, reason)
        return len(tasks)

    def accept(self, new: NewRun, *, check: ModelCheck | None = None) -> Run:
        """Accepts a run of specs; several agents are possible. Raises: as `enqueue` and `check`."""
        from app.ledger import accept

        return self._accepted(accept.accept(self.database, self.ledger.checked(new, check), self.settings))

    def try_out(self, new: NewRun, *, check: ModelCheck | None = None) -> NewRun:
        """Returns the run that `accept` would write now; writes nothing. Raises: as `accept`."""
        from app.ledger import classes

        new = self.ledger.checked(new, check)
        with self.database.begin() as connection:
            classes.check(connection, self.settings, {(spec.mode, spec.resource_class) for spec in new.specs})
        return new

    def _remote(self) -> RemoteInstallation | None:
        return None if isinstance(self.installation, LedgerInstallation) else self.installation

    def _accepted(self, accepted: Accepted) -> Run:
        return self.run(accepted.run_id, accepted.task_ids, accepted.names)

    def run(self, run_id: UUID, task_ids: Sequence[UUID] | None = None, names: Sequence[str] | None = None) -> Run:
        """Returns a run by its id. Raises: UnknownName."""
        if task_ids is None:
            self.status(run_id)
            task_ids = self.installation.task_ids(run_id)
        labels = names or [""] * len(task_ids)
        handles = [Handle(self, i, run_id, name) for i, name in zip(task_ids, labels, strict=True)]
        return Run(self, run_id, handles)

    def status(self, run_id: UUID) -> RunStatus:
        """Returns the status of a run. Raises: UnknownName."""
        return self.installation.status(run_id)

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
        """Returns a training run's samples for one trainer. Needs the extras `model` and `datasets`.

        policy: the model's stable name. quorum: replicas that complete a group, if the run was submitted without
        one; the others are superseded. drop_equal: leave out groups whose rewards are all equal. max_staleness: maximum
        versions between the live one and the oldest in a group; tasks run no further ahead. lease_s: lease of a batch.

        Raises: UnknownName; SampleRefused: the run's purpose is not `training`; SpecInvalid; ArtifactStoreUnavailable.
        """
        if not isinstance(run, Run):
            raise SpecInvalid(f"expected a run, as `submit` or `flow.run(run_id)` returns one; found {run!r:.80}")
        from app.experience.hand_out import Experience
        from app.ledger.experience import ExperienceRun

        how = ExperienceRun(run.id, policy, quorum=quorum, drop_equal=drop_equal, max_staleness=max_staleness)
        return Experience(self.database, self.ledger.store, how, consumer=consumer, lease_s=lease_s)

    def check_model(self, model: ModelChoice | str) -> list[str]:
        """Makes the gateway check the model's endpoint and key now; returns what could not be checked.

        `enqueue` does not do this: a producer may submit before any gateway runs.

        Raises: ModelEndpointUnavailable: no connection, a refused or missing key, an unknown model, or no gateway
            answers; DatabaseUnavailable.
        """
        from app.model_service.checking import check_engine

        chosen = ModelChoice(name=model) if isinstance(model, str) else model
        return check_engine(self.settings, self.database, chosen)[0]

    def cancel(self, task_ids: Sequence[UUID]) -> None:
        """Cancels tasks. Running ones are signalled at once; waiting ones end now; ended ones stay as they are."""
        self.installation.cancel(task_ids)

    def retry(self, task_ids: Sequence[UUID]) -> list[UUID]:
        """Queues tasks again that could not be scored or were cancelled; returns their ids."""
        return self.installation.retry(task_ids)

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
        """Yields events after a position (`start`, `now`, or an event's own): at least once, in order for each task.

        kinds: full names, or prefixes that end in a dot. With `follow`, continues until `stop` is set; waits out an
        outage of PostgreSQL, and calls `outage` with the error.

        Raises: SpecInvalid: no such position; DatabaseUnavailable.
        """
        ends = stop or threading.Event()
        return self.installation.events(
            position, follow=follow, kinds=kinds, run_id=run_id, task_id=task_id, stop=ends, outage=outage
        )

    def wait_any(self, task_ids: Iterable[UUID], timeout: float | None = None) -> list[UUID]:
        """Blocks until one of the tasks has ended; returns those that have, or none after `timeout` seconds."""
        return next(self.installation.completions(set(task_ids), timeout), [])

    def close(self) -> None:
        """Closes the connections. Accepted tasks go on."""
        self.installation.close()
        if self._owns_database and isinstance(self.installation, LedgerInstallation):
            self.installation.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Handle:
    """An accepted task."""

    flow: MegaFlow
    task_id: UUID
    run_id: UUID
    name: str = ""

    def status(self) -> TaskState:
        """Returns the task's state now."""
        return self.flow.installation.results([self.task_id])[0].state

    def result(self, timeout: float | None = None) -> TaskResult:
        """Waits for the end; returns verdict, end reason, artifacts, phase times, attempts.

        timeout: seconds; None: no limit. A failed or cancelled task is a result too. Raises: WaitTimeout: it goes on.
        """
        if not self.flow.wait_any([self.task_id], timeout):
            raise WaitTimeout(f"task {self.name or self.task_id} had not ended after {timeout} s; it goes on")
        return self.flow.installation.results([self.task_id])[0]

    def cancel(self) -> None:
        """Cancels the task, and the tasks that wait for it. Its containers are removed."""
        self.flow.cancel([self.task_id])

    def _repr_html_(self) -> str:
        from app.notebook import html_of_task

        page = f"{self.flow.installation.web_base}/tasks/{self.task_id}"
        return html_of_task(self.name or str(self.task_id), page, self.status().value)

    def artifact(self, kind: ArtifactKind | str) -> ArtifactReference:
        """Returns an artifact (`patch`, …) as an input of a later task. Raises: UnknownName: no such kind."""
        return ArtifactReference.of(self.task_id, kind)


@dataclass(frozen=True, slots=True)
class Run:
    """Tasks accepted together. `handles` do not include replicas that groups of a training run get later."""

    flow: MegaFlow
    id: UUID
    handles: list[Handle]

    def status(self) -> RunStatus:
        """Returns counts by state, and the scores with their denominator."""
        return self.flow.status(self.id)

    def results(self, timeout: float | None = None) -> list[TaskResult]:
        """Waits for all tasks; returns results in the order of submission. Raises: WaitTimeout."""
        for _ in as_completed(self.handles, timeout):
            pass
        return self.flow.installation.results([handle.task_id for handle in self.handles])

    def to_pandas(self) -> pandas.DataFrame:
        """Returns a row for each task as it is now: `app.notebook.frame_of`. Raises: DependencyMissing."""
        from app.notebook import frame_of

        return frame_of(self._now())

    def _now(self) -> list[TaskResult]:
        return self.flow.installation.results([handle.task_id for handle in self.handles])

    def _repr_html_(self) -> str:
        from app.notebook import html_of_run

        return html_of_run(self.status(), f"{self.flow.installation.web_base}/runs/{self.id}", self._now())

    def cancel(self) -> None:
        """Cancels all tasks of the run, with the replicas that groups got later."""
        self.flow.cancel(self.flow.installation.task_ids(self.id))


def as_completed(handles: Iterable[Handle], timeout: float | None = None) -> Iterator[Handle]:
    """Yields handles in the order in which their tasks end. All must be of one `MegaFlow`.

    Raises: WaitTimeout when `timeout` seconds have passed before the last.
    """
    left = {handle.task_id: handle for handle in handles}
    if left:
        flow = next(iter(left.values())).flow
        for ended in flow.installation.completions(set(left), timeout):
            yield from map(left.pop, ended)
    if left:
        raise WaitTimeout(f"{len(left)} tasks had not ended after {timeout} s; they go on")


def _purpose(given: Purpose | str) -> Purpose:
    try:
        return Purpose(given)
    except ValueError:
        raise SpecInvalid(f"unknown purpose {given!r}; known: {', '.join(Purpose)}; nothing was submitted") from None
