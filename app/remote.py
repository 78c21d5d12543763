"""Accesses an installation through its web server's HTTP API, as `app.installation` does through a database."""

from __future__ import annotations

import math
import shutil
import tarfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote
from uuid import UUID

from pydantic import TypeAdapter, ValidationError

from app.errors import BrokerUnavailable, DatabaseUnavailable, ExportRefused, ServerUnavailable, TooManyRequests
from app.installation import RunNotes
from app.ledger.accept import Accepted
from app.ledger.events import EventRecord
from app.ledger.limits import Use
from app.ledger.model_usage import UsageRow
from app.ledger.pauses import Change
from app.ledger.quotas import Quota, QuotaUsage
from app.ledger.results import Progress, RunStatus
from app.ledger.schedules import Schedule
from app.ledger.stories import RunStory, TaskStory
from app.ledger.stream import StreamedEvent
from app.models.graphs import NO_UPSTREAM, ComesAfter
from app.models.groups import Adaptive
from app.models.kinds import UsageBy
from app.models.outcome import Artifact, TaskResult
from app.remote_http import Ask, WebServer

if TYPE_CHECKING:
    from app.evaluation import Submission
    from app.evaluation.comparison import Comparison
    from app.evaluation.diagnosis import FailureGroup
    from app.evaluation.export import ExportFormat, ExportSummary
    from app.evaluation.report import Report
    from app.evaluation.transcripts import TranscriptReport

Model = TypeVar("Model")

_IDS = 10_000
"""Maximum tasks in one request that changes them; a request that waits for tasks has up to ten times as many."""
_RESULTS = 500
_PAGE = 1000
"""Maximum runs in one response."""
_WAIT_S = 25.0
"""Maximum seconds after which the server answers a wait."""
_PAUSE_S = 1.0
"""Pause between two connections to an event stream, in seconds."""


def _earlier(upstream: ComesAfter) -> list[dict[str, UUID]]:
    return [{"task_id": one} for one in sorted(upstream.tasks)]


class RemoteInstallation:
    """Installation accessed through a web server. Methods as in `LedgerInstallation`; all raise the server's refusals.

    While the server is away, safe requests are retried for `patience_s`.
    """

    def __init__(self, url: str, token: str, *, patience_s: float = 60.0) -> None:
        """Raises: SettingsInvalid: no such URL."""
        self.server = WebServer(url, token, patience_s)

    @property
    def web_base(self) -> str:
        return self.server.url

    @property
    def evidence(self) -> str:
        return f"{self.server.url}/tasks/TASK"

    def submit(
        self, submission: Submission, idempotency_key: str | None, upstream: ComesAfter = NO_UPSTREAM
    ) -> Accepted:
        """Makes the server read a dataset and accept its tasks as one run."""
        body = {"submission": submission.model_dump(mode="json", exclude_defaults=True), "after": _earlier(upstream)}
        return self._submitted(body, idempotency_key)

    def enqueue(
        self, options: Mapping[str, Any], idempotency_key: str | None, upstream: ComesAfter = NO_UPSTREAM
    ) -> Accepted:
        """Submits tasks as one run. options: as in `MegaFlow.enqueue_many`.

        The user `default` stands for the token's user.
        """
        given = {name: one for name, one in options.items() if one is not None}
        if isinstance(replicas := given.get("replicas"), Adaptive):
            given["replicas"] = (replicas.least, replicas.most)
        if given.get("user_name") == "default":
            del given["user_name"]
        inputs = {path: {"task_id": one.task_id, "kind": one.kind} for path, one in upstream.inputs.items()}
        given |= {"tasks": list(given["tasks"]), "after": _earlier(upstream), "inputs": inputs}
        return self._submitted(given, idempotency_key)

    def _submitted(self, body: Mapping[str, Any], idempotency_key: str | None) -> Accepted:
        """Submits a run; generates an idempotency key when none is given, so that retries are safe."""
        key = idempotency_key or f"client-{uuid.uuid4()}"
        request = Ask("POST", "/runs", body={**body, "idempotency_key": key}, again=True, timeout_s=600)
        return self._answer(Accepted, request)

    def find_run(self, name: str) -> UUID:
        return self._get(UUID, "/find", {"run": name})

    def find_task(self, name: str) -> UUID:
        return self._get(UUID, "/find", {"task": name})

    def runs(self, limit: int) -> list[RunStatus]:
        """Returns runs, newest first: the user's own, or all for an administrator."""
        statuses: list[RunStatus] = []
        while len(statuses) < limit:
            most = min(_PAGE, limit - len(statuses))
            page = self._get(list[RunStatus], "/runs", {"limit": most, "before": statuses[-1].id if statuses else None})
            statuses += page
            if len(page) < most:
                break
        return statuses

    def status(self, run_id: UUID) -> RunStatus:
        return self._get(RunStatus, f"/runs/{run_id}")

    def progress(self, run_ids: Sequence[UUID]) -> Progress:
        return self._get(Progress, "/progress", {"run": list(run_ids)})

    def notes(self, run_id: UUID) -> RunNotes:
        return self._get(RunNotes, f"/runs/{run_id}/notes")

    def task_ids(self, run_id: UUID) -> list[UUID]:
        return self._get(list[UUID], f"/runs/{run_id}/task-ids")

    def results(self, task_ids: Sequence[UUID]) -> list[TaskResult]:
        return [
            one
            for part in _parts(task_ids, _RESULTS)
            for one in self._post(list[TaskResult], "/tasks/results", {"task_ids": part}, again=True)
        ]

    def task_events(self, task_id: UUID) -> list[EventRecord]:
        return self._get(list[EventRecord], f"/tasks/{task_id}/events")

    def content(self, attempt_id: UUID, artifact: Artifact) -> bytes:
        return self.server.ask(Ask("GET", f"/attempts/{attempt_id}/artifacts/{artifact.kind.value}")).content

    def completions(self, task_ids: set[UUID], timeout: float | None) -> Iterator[list[UUID]]:
        until, left = None if timeout is None else time.monotonic() + timeout, set(task_ids)
        while left:
            wait_s = _WAIT_S if until is None else max(0.0, min(_WAIT_S, until - time.monotonic()))
            ended = [one for part in _parts(sorted(left), _IDS * 10) for one in self._ended(part, wait_s, until)]
            if ended:
                left.difference_update(ended)
                yield ended
            elif until is not None and time.monotonic() >= until:
                return

    def _ended(self, task_ids: Sequence[UUID], wait_s: float, until: float | None) -> list[UUID]:
        body = {"task_ids": task_ids, "timeout_s": wait_s}
        left_s = math.inf if until is None else until - time.monotonic()
        request = Ask("POST", "/tasks/wait", body=body, again=True, timeout_s=60 + wait_s, patience_s=left_s)
        try:
            answer = self._answer(dict[str, list[UUID]], request)
        except TooManyRequests:  # other waits of the user come first
            return []
        return answer["task_ids"]

    def cancel(self, task_ids: Sequence[UUID]) -> None:
        for part in _parts(task_ids, _IDS):
            self._post(dict[str, Any], "/tasks/cancel", {"task_ids": part}, again=True)

    def retry(self, task_ids: Sequence[UUID]) -> list[UUID]:
        return [
            one
            for part in _parts(task_ids, _IDS)
            for one in self._post(dict[str, list[UUID]], "/tasks/retry", {"task_ids": part})["task_ids"]
        ]

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
        """Yields as `MegaFlow.events`; reconnects after the last event, for `patience_s` at first."""
        query = {"after": position, "follow": follow, "kind": list(kinds), "run": run_id, "task": task_id}
        request, at, well = Ask("GET", "/events", query=query), "", False
        until = time.monotonic() + self.server.patience_s
        while not (stop.is_set() and follow):
            try:
                for one in self.server.events(request, at, stop if follow else None):
                    at, well, until = one.id or at, True, time.monotonic() + self.server.patience_s
                    if one.data:
                        yield _streamed(one.data)
                if not follow:
                    return
            except DatabaseUnavailable as error:
                if time.monotonic() >= until and not (follow and at):
                    raise
                if well and follow and outage is not None:
                    outage(error)
                well = False
            stop.wait(_PAUSE_S)

    def pause(self, run: str, reason: str) -> Change:
        return self._post(Change, f"/runs/{self.find_run(run)}/pause", {"reason": reason}, again=True)

    def resume(self, run: str) -> Change:
        return self._post(Change, f"/runs/{self.find_run(run)}/resume", {}, again=True)

    def limits(self, unknown: Callable[[BrokerUnavailable], object]) -> list[Use]:
        """Returns every limit that is set, held or waited for. unknown: never called; the server logs the reason."""
        return self._get(list[Use], "/limits")

    def set_limit(self, name: str, capacity: float | None, reason: str = "") -> None:
        body = {"capacity": capacity, "reason": reason}
        self.server.json(Ask("PUT", f"/limits/{quote(name)}", body=body, again=True))

    def quotas(self) -> list[QuotaUsage]:
        return self._get(list[QuotaUsage], "/quotas")

    def set_quota(self, user: str, changes: dict[str, Any], reason: str = "") -> Quota:
        return self._answer(Quota, Ask("PUT", f"/quotas/{quote(user)}", body={**changes, "reason": reason}, again=True))

    def clear_quota(self, user: str, reason: str = "") -> None:
        self.server.json(Ask("DELETE", f"/quotas/{quote(user)}", query={"reason": reason}))

    def add_schedule(self, name: str, cron: str, submission: Submission, misfire: str, reason: str) -> int:
        """Adds a schedule; returns how many tasks it would submit now. Raises: NotAllowed."""
        fields = submission.model_dump(mode="json", exclude_defaults=True)
        body = {"name": name, "cron": cron, "submission": fields, "misfire": misfire, "reason": reason}
        return int(self.server.json(Ask("POST", "/schedules", body=body, timeout_s=600))["tasks"])

    def schedules(self) -> list[Schedule]:
        """Returns recurring evaluations, by name: the user's own, or all for an administrator."""
        return self._get(list[Schedule], "/schedules")

    def remove_schedule(self, name: str, reason: str = "") -> None:
        self.server.json(Ask("DELETE", f"/schedules/{quote(name)}", query={"reason": reason}))

    def usage(self, by: UsageBy, *, run_id: UUID | None, user: str | None) -> list[UsageRow]:
        return self._get(list[UsageRow], "/usage", {"by": by, "run": run_id, "user": user})

    def explain_run(self, run_id: UUID) -> RunStory:
        return self._get(RunStory, f"/runs/{run_id}/explanation")

    def explain_task(self, task_id: UUID) -> TaskStory:
        return self._get(TaskStory, f"/tasks/{task_id}/explanation")

    def report(self, run_id: UUID, *, allow_loss: bool) -> Report:
        from app.evaluation.report import Report

        return self._get(Report, f"/runs/{run_id}/report", {"allow_loss": allow_loss})

    def transcripts(self, run_id: UUID) -> TranscriptReport:
        from app.evaluation.transcripts import TranscriptReport

        return self._get(TranscriptReport, f"/runs/{run_id}/transcripts", timeout_s=600)

    def compare(self, first: UUID, second: UUID, *, allow: Sequence[str], power: float | None) -> Comparison:
        from app.evaluation.comparison import Comparison

        query = {"first": first, "second": second, "allow": list(allow), "power": power}
        return self._get(Comparison, "/comparison", query)

    def diagnose(self, run_id: UUID) -> list[FailureGroup]:
        from app.evaluation.diagnosis import FailureGroup

        return self._get(list[FailureGroup], f"/runs/{run_id}/diagnosis")

    def export(self, run_id: UUID, form: ExportFormat, to: Path, **chosen: Any) -> ExportSummary:
        """Writes the server's export to `to`. Raises: ExportRefused, ArtifactStoreUnavailable."""
        from app.evaluation.export import ExportSummary

        request = Ask("GET", f"/runs/{run_id}/export", query={"format": form.value, **chosen}, timeout_s=600)
        summary = self._fetched(request, to, "megaflow-export")
        return ExportSummary.model_validate_json(summary).model_copy(update={"path": str(to)})

    def _fetched(self, asked: Ask, to: Path, header: str) -> str:
        """Downloads a file, or the folder of a tar, to the new place `to`; returns the value of the header `header`."""
        from app.evaluation.export import new_place

        with new_place(to) as part, TemporaryFile() as received:
            reply = self.server.ask(asked, received)
            description = reply.headers.get(header, "")
            if not description:
                raise ExportRefused("expected an answer of the server that says what was written; found none")
            received.seek(0)
            if reply.headers.get("content-type") == "application/x-tar":
                with tarfile.open(fileobj=received) as archive:
                    archive.extractall(part, filter="data")
            else:
                with part.open("wb") as file:
                    shutil.copyfileobj(received, file)
        return description

    def close(self) -> None:
        """Does nothing: no connection stays open."""

    def _get(
        self, kind: type[Model], path: str, query: Mapping[str, Any] | None = None, timeout_s: float = 60
    ) -> Model:
        return self._answer(kind, Ask("GET", path, query=query or {}, timeout_s=timeout_s))

    def _post(
        self, kind: type[Model], path: str, body: Mapping[str, Any], *, again: bool = False, timeout_s: float = 60
    ) -> Model:
        return self._answer(kind, Ask("POST", path, body=body, again=again, timeout_s=timeout_s))

    def _answer(self, kind: type[Model], asked: Ask) -> Model:
        return self.server.read(TypeAdapter(kind), self.server.ask(asked).content)


def _streamed(body: dict[str, Any]) -> StreamedEvent:
    """Builds an event from the JSON of `StreamedEvent.body`. Raises: ServerUnavailable: it is not an event."""
    try:
        position = str(body.pop("position"))
        return StreamedEvent(position, _EVENT.validate_python(tuple(body.get(name) for name in EventRecord._fields)))
    except (KeyError, ValidationError):
        raise ServerUnavailable("expected an event, found another object; is the server of this release?") from None


_EVENT: TypeAdapter[EventRecord] = TypeAdapter(EventRecord)


def _parts(ids: Sequence[UUID], most: int) -> Iterator[Sequence[UUID]]:
    for begin in range(0, len(ids), most):
        yield ids[begin : begin + most]
