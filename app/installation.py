"""Accesses an installation through its ledger. `app.remote` offers the same over HTTP.

Modules for accepting, explaining and following are imported where used: listing runs needs a third of the modules.
"""

from __future__ import annotations

import os
import pwd
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from app.errors import AmbiguousName, ArtifactMissing, BrokerUnavailable, DatabaseUnavailable, SpecInvalid, UnknownName
from app.ledger import events, limits, names, pauses, quotas, results, schedules, stream
from app.ledger.database import Database, sql
from app.ledger.events import EventRecord
from app.ledger.limits import Use
from app.ledger.outcomes import Outcomes
from app.ledger.pauses import Change
from app.ledger.quotas import Quota, QuotaUsage
from app.ledger.results import Progress, RunStatus
from app.ledger.schedules import Schedule
from app.ledger.stream import StreamedEvent
from app.ledger.users import record_action
from app.models.kinds import UsageBy
from app.models.outcome import Artifact, TaskResult
from app.models.spec import ModelChoice
from app.models.validation import VALIDATORS
from app.settings import Settings

if TYPE_CHECKING:
    from app.artifacts import ArtifactStore
    from app.evaluation import Submission
    from app.evaluation.comparison import Comparison
    from app.evaluation.diagnosis import FailureGroup
    from app.evaluation.export import ExportFormat, ExportSummary
    from app.evaluation.regrade import RegradeSummary, VerifierPlace
    from app.evaluation.report import Report
    from app.evaluation.transcripts import TranscriptReport
    from app.ledger.accept import NewRun
    from app.ledger.model_usage import UsageRow
    from app.ledger.stories import RunStory, TaskStory


@dataclass(frozen=True, slots=True)
class RunNotes:
    """Notes on a run's score. interval: of its pass rate at 95 %; None: nothing scored, or no `scipy`."""

    open_networks: int  # tasks that may reach every public address
    provenance: dict[str, Any] | None
    interval: tuple[float, float] | None
    unvalidated: str  # a line on scored tasks whose images were not validated; empty: all were


def record_command(database: Database, action: str, subject: object, reason: str = "", **data: Any) -> None:
    """Records a command that changed the database directly, under its system account: no user has such a name."""
    try:
        account = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # often in a container
        account = f"uid {os.geteuid()}"
    record_action(database, f"{account} on {socket.gethostname()}", action, [str(subject)], reason, **data)


class LedgerInstallation:
    """Installation with direct access to its ledger and artifact store."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self.settings, self.database = settings, database
        self._outcomes = Outcomes(database)

    @property
    def web_base(self) -> str:
        """URL of the pages."""
        return self.settings.web_base()

    @property
    def evidence(self) -> str:
        """Location of artifacts, for display."""
        return f"{self.settings.artifacts()}/runs/RUN/TASK/ATTEMPT"

    @property
    def store(self) -> ArtifactStore:
        """Raises: SettingsInvalid, ArtifactStoreUnavailable."""
        from app.artifacts import open_store

        return open_store(self.settings.artifacts(), endpoint_url=self.settings.s3_endpoint_url)

    def checked(self, new: NewRun, check: Callable[[ModelChoice], None] | None) -> NewRun:
        """Checks a new run and adapts it to its purpose. Raises: as `MegaFlow.enqueue` and `check`."""
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

    def with_projects(self, new: NewRun) -> NewRun:
        """Returns the run after checking its compose files. Raises: as `MegaFlow.enqueue`."""
        from app.artifacts.bundles import fetch_bundle
        from app.submission import refuse_wrong_projects

        refuse_wrong_projects([spec.task for spec in new.specs], lambda bundle: fetch_bundle(self.store, bundle))
        return new

    def find_run(self, name: str) -> UUID:
        """Raises: UnknownName, AmbiguousName."""
        return names.find(self.database, "runs", name)

    def find_task(self, name: str) -> UUID:
        """Raises: UnknownName, AmbiguousName."""
        return names.find(self.database, "tasks", name)

    def runs(self, limit: int) -> list[RunStatus]:
        """Returns the statuses of runs, newest first."""
        return results.runs(self.database, limit)

    def status(self, run_id: UUID) -> RunStatus:
        """Raises: UnknownName."""
        return results.run_status(self.database, run_id)

    def progress(self, run_ids: Sequence[UUID]) -> Progress:
        """Returns the progress of all these runs together."""
        return results.progress_of(self.database, list(run_ids))

    def notes(self, run_id: UUID) -> RunNotes:
        """Raises: UnknownName."""
        from app.evaluation import statistics
        from app.evaluation.report import BASELINES

        groups = results.solved_counts(self.database, run_id, without=BASELINES)
        try:
            rate = statistics.pass_rate(groups)
        except ImportError:  # replicas need the extra `report`
            rate = None
        return RunNotes(
            results.open_networks(self.database, run_id),
            results.run_head(self.database, run_id).provenance,
            None if rate is None else (rate.low, rate.high),
            self._unvalidated(run_id),
        )

    def _unvalidated(self, run_id: UUID) -> str:
        from app.evaluation.validation import unvalidated_note
        from app.ledger import validations

        statement = """
            SELECT id FROM tasks
            WHERE run_id = :run AND verdict->>'reward' IS NOT NULL AND NOT scripted AND NOT agent = ANY(:agents)"""
        with self.database.begin() as connection:
            scored = list(sql(connection, statement, {"run": run_id, "agents": sorted(VALIDATORS)}).scalars())
        if not scored:
            return ""
        known = validations.states_of_run(self.database, run_id)
        return unvalidated_note([known[one].state if one in known else None for one in scored])

    def task_ids(self, run_id: UUID) -> list[UUID]:
        """Returns a run's task ids in the order of acceptance."""
        return results.task_ids(self.database, run_id)

    def results(self, task_ids: Sequence[UUID]) -> list[TaskResult]:
        """Returns the results in the order of `task_ids`. Raises: UnknownName."""
        return results.results(self.database, task_ids)

    def task_events(self, task_id: UUID) -> list[EventRecord]:
        """Returns all events of a task, in order."""
        return events.of_task(self.database, task_id)

    def content(self, attempt_id: UUID, artifact: Artifact) -> bytes:
        """Returns the bytes of an attempt's artifact. Raises: ArtifactMissing, ArtifactStoreUnavailable."""
        if artifact.key is None:
            raise ArtifactMissing(f"the artifact {artifact.kind.value} of {attempt_id} has no bytes")
        return self.store.get(artifact.key)

    def completions(self, task_ids: set[UUID], timeout: float | None) -> Iterator[list[UUID]]:
        """Yields tasks when they have ended, until all have or `timeout` seconds have passed."""
        return self._outcomes.completions(task_ids, timeout)

    def cancel(self, task_ids: Sequence[UUID]) -> None:
        """Cancels tasks; running ones are asked to stop."""
        from app.ledger import tasks
        from app.stopping import nudge

        running = tasks.cancel(self.database, task_ids)
        if running:
            nudge(self.settings, running)

    def retry(self, task_ids: Sequence[UUID]) -> list[UUID]:
        """Puts tasks back in the queue; returns those moved."""
        from app.ledger import tasks

        return tasks.retry(self.database, task_ids)

    def events(
        self,
        position: str,
        *,
        follow: bool,
        kinds: Sequence[str],
        run_id: UUID | None,
        task_id: UUID | None,
        stop: threading.Event,
        outage: Callable[[DatabaseUnavailable], object] | None,
    ) -> Iterator[StreamedEvent]:
        """Yields events as `MegaFlow.events` does."""
        filters, at = stream.EventFilter(tuple(kinds), run_id, task_id), stream.place(self.database, position)
        if follow:
            yield from stream.follow(self.database, at, stop, filters, outage=outage)
            return
        page = stream.read(self.database, at, stream.PAGE, filters)
        yield from page.events
        while len(page.events) == stream.PAGE:
            page = stream.read(self.database, page.position, stream.PAGE, filters)
            yield from page.events

    def pause(self, run: str, reason: str) -> Change:
        """Raises: UnknownName, AmbiguousName."""
        change = pauses.pause(self.database, run, reason)
        record_command(self.database, "run.paused", change.run_id, reason)
        return change

    def resume(self, run: str) -> Change:
        """Raises: UnknownName, AmbiguousName."""
        change = pauses.resume(self.database, run)
        record_command(self.database, "run.resumed", change.run_id)
        return change

    def limits(self, unknown: Callable[[BrokerUnavailable], object]) -> list[Use]:
        """Returns every limit that is set, held or waited for. unknown: called if the use of model calls is unknown."""
        import redis

        from app.model_service import limiter

        by_name = {use.name: use for use in limits.show(self.database, self.settings)}
        try:
            with redis.Redis.from_url(self.settings.redis(), socket_connect_timeout=2, socket_timeout=5) as client:
                calls = limiter.in_use(client, limiter.prefix_of(self.settings))
        except BrokerUnavailable as error:
            unknown(error)
            calls = {}
        for name, call in calls.items():
            applies = by_name.get(name) or by_name.get(limits.everybody(name))
            applies = applies or limits.Use(name, None, None, None, "default")
            by_name[name] = replace(applies, name=name, used=call.used, waiting=call.waiting)
        return sorted(by_name.values(), key=lambda use: use.name)

    def set_limit(self, name: str, capacity: float | None, reason: str = "") -> None:
        """Sets a limit; None restores its default. Raises: LimitInvalid."""
        if capacity is None:
            limits.clear_limit(self.database, name)
        else:
            limits.set_limit(self.database, name, capacity)
        record_command(self.database, "limit.set", name, reason, capacity=capacity)

    def quotas(self) -> list[QuotaUsage]:
        """Returns the users' quotas and their use."""
        return quotas.usage(self.database)

    def set_quota(self, user: str, changes: dict[str, Any], reason: str = "") -> Quota:
        """Raises: LimitInvalid."""
        changed = quotas.set_quota(self.database, user, **changes)
        record_command(self.database, "quota.set", user, reason, **changes)
        return changed

    def clear_quota(self, user: str, reason: str = "") -> None:
        """Raises: LimitInvalid."""
        quotas.remove(self.database, user)
        record_command(self.database, "quota.cleared", user, reason)

    def schedules(self) -> list[Schedule]:
        """Returns recurring evaluations, by name."""
        return schedules.all_of(self.database)

    def add_schedule(self, name: str, cron: str, submission: Submission, misfire: str, reason: str = "") -> None:
        """Raises: SpecInvalid."""
        schedules.add(self.database, name=name, cron=cron, misfire=misfire, **submission.scheduled())
        record_command(self.database, "schedule.added", name, reason)

    def remove_schedule(self, name: str, reason: str = "") -> None:
        """Raises: UnknownName."""
        schedules.remove(self.database, name)
        record_command(self.database, "schedule.removed", name, reason)

    def usage(self, by: UsageBy, *, run_id: UUID | None, user: str | None) -> list[UsageRow]:
        """Returns tokens, dollars and time, most expensive first."""
        from app.instances.prices import prices_of
        from app.ledger import model_usage

        with self.database.begin() as connection:
            return model_usage.usage(connection, by, run_id=run_id, user=user, price=prices_of(self.settings))

    def explain_run(self, run_id: UUID) -> RunStory:
        """Explains where a run's time went."""
        from app.ledger import explain_run

        return explain_run.run(self.database, self.settings, run_id)

    def explain_task(self, task_id: UUID) -> TaskStory:
        """Explains what a task is doing or waiting for."""
        from app.ledger import explain

        return explain.task(self.database, self.settings, task_id)

    def report(self, run_id: UUID, *, allow_loss: bool) -> Report:
        """Raises: ReportRefused."""
        from app.evaluation.report import report_of, require_headline
        from app.instances.prices import prices_of
        from app.ledger import report_rows

        rows = report_rows.rows(self.database, run_id, prices_of(self.settings))
        report = report_of(results.run_head(self.database, run_id), rows)
        if not allow_loss:
            require_headline(report)
        return report

    def transcripts(self, run_id: UUID) -> TranscriptReport:
        """Checks a run's transcripts against the rules. Raises: ArtifactStoreUnavailable, DiskFull."""
        from app.evaluation.transcripts import checked_once
        from app.ledger import report_rows

        rows = report_rows.rows(self.database, run_id)
        return checked_once(self.database, self.store, run_id, rows)

    def compare(self, first: UUID, second: UUID, *, allow: Sequence[str], power: float | None) -> Comparison:
        """Raises: ReportRefused."""
        from app.evaluation.comparison import compare
        from app.ledger import report_rows

        rows = [report_rows.rows(self.database, one) for one in (first, second)]
        return compare(rows[0], rows[1], allow=allow, power_difference=power)

    def diagnose(self, run_id: UUID) -> list[FailureGroup]:
        """Groups a run's failures by common features."""
        from app.evaluation.diagnosis import diagnose
        from app.ledger import report_rows

        return diagnose(report_rows.rows(self.database, run_id))

    def export(self, run_id: UUID, form: ExportFormat, to: Path, **chosen: Any) -> ExportSummary:
        """Exports a run. chosen: fields of `ExportSource`. Raises: ExportRefused, ArtifactStoreUnavailable."""
        from app.evaluation.export import ExportSource, export

        return export(ExportSource(self.database, self.store, run_id, **chosen), form, to)

    def regrade(self, run_id: UUID, *, grader: str | None, place: VerifierPlace | None = None) -> RegradeSummary:
        """Grades stored test reports again, with this machine's grading libraries. Raises: as `regrade`."""
        from app.agents.installation import Installer
        from app.evaluation.regrade import regrade
        from app.grading.resident_libraries import GradingLibraries

        install = Installer(self.settings.tools, ready=self.settings.ready_tools).install_library
        with closing(GradingLibraries(install, most_processes=os.cpu_count() or 1)) as libraries:
            return regrade(self.database, self.store, libraries, run_id, grader=grader, place=place)

    def close(self) -> None:
        """Stop waiting; the database is its owner's."""
        self._outcomes.close()


def run_or_task(installation: Any, name: str) -> tuple[str, UUID]:
    """Returns `run` or `task`, and the id that a name means; runs come first. Raises: UnknownName; AmbiguousName."""
    try:
        return "run", installation.find_run(name)
    except AmbiguousName:
        raise
    except UnknownName:
        try:
            return "task", installation.find_task(name)
        except UnknownName as error:
            raise UnknownName(f"{error}; nor a run of yours") from None
